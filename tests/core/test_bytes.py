"""Any byte count at any byte offset, at any message number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator
from purlin_core.reference import reduce
from purlin_core.spec import Op
from tests.core.cases import SUM_DTYPES, numbers
from tests.core.worlds import REGIMES, random_tensor, same_bits, same_values, world_of

COUNTS = range(258)
GUARD = 0xC3  # lies around every output and must still lie there afterwards


def placed(x: Tensor, offset: int) -> Tensor:
    """The same values, `offset` bytes after an address that is divisible by 64."""
    room = torch.zeros(x.numel() * x.element_size() + 128, dtype=torch.uint8)
    at = -room.data_ptr() % 64 + offset
    room[at : at + x.numel() * x.element_size()] = x.reshape(-1).view(torch.uint8)
    return room[at : at + x.numel() * x.element_size()].view(x.dtype).view(x.shape)


class Target:
    """An output at a byte offset, between guards."""

    def __init__(self, room: Tensor, size: int, offset: int, dtype: torch.dtype = torch.uint8) -> None:
        at = -room.data_ptr() % 64 + offset + 16
        room.fill_(GUARD)
        self.before, self.after = room[:at], room[at + size :]
        self.out = room[at : at + size].view(dtype)

    def intact(self) -> bool:
        return bool((self.before == GUARD).all() and (self.after == GUARD).all())


def fours(offsets: Sequence[int]) -> Iterator[Sequence[int]]:
    return (offsets[i : i + 4] for i in range(0, len(offsets), 4))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_byte_count_at_every_offset_and_nothing_beside_it(ranks: int, regime: str) -> None:
    counts = COUNTS if ranks == 2 else range(ranks, 258, 7 * ranks)

    def gather(comm: Communicator, count: int, shards: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
        for offsets in fours(range(16)):
            targets = [Target(room, ranks * count, offset) for room, offset in zip(rooms, offsets, strict=True)]
            inputs = [placed(shards[comm.rank], 15 - offset) for offset in offsets]
            comm.exchange(inputs, "n@ -> n", out=[target.out for target in targets])
            assert all(same_bits(target.out, torch.cat(list(shards))) and target.intact() for target in targets), (
                count,
                offsets,
            )

    def work(comm: Communicator) -> None:
        make = partial(comm.empty, dtype=torch.uint8) if regime == "direct" else partial(torch.empty, dtype=torch.uint8)
        rooms = [make((258 * ranks + 128,)) for _ in range(4)]
        for count in counts:
            gather(comm, count, [random_tensor((count,), torch.uint8, 99 * r + count) for r in range(ranks)], rooms)

    with world_of(ranks, regime, teams=1 + ranks % 2) as world:
        world.run(work)


@pytest.mark.parametrize("regime", ["packet", "staged"])
@pytest.mark.parametrize("dtype", SUM_DTYPES)
def test_every_length_of_every_dtype_at_every_offset_is_reduced(dtype: torch.dtype, regime: str) -> None:
    size = dtype.itemsize
    op: Op = "max" if size == 8 else "sum"
    lengths = [*range(0, 258 // size, 3 if size == 1 else 1), 63, 64, 65, 128, 200, 257]  # vectors are 64 elements long
    cases = [[numbers((n,), dtype, 2 * n + rank) for rank in range(2)] for n in lengths]
    totals = [reduce(xs, op) for xs in cases]

    def work(comm: Communicator) -> None:
        room = torch.empty(4096, dtype=torch.uint8)
        for n, xs, total in zip(lengths, cases, totals, strict=True):
            offset = n * size % 16
            target = Target(room, n * size, offset, dtype)
            comm.redistribute(placed(xs[comm.rank], 16 - offset), "+n -> n", op=op, out=target.out)
            assert same_values(target.out, total) and target.intact(), (n, offset)

    with world_of(2, regime, teams=2, slot_bytes=48) as world:
        world.run(work)


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("size", [4095, 4096, 4097, 4159, 70_001, (256 << 10) + 13, (3 << 19) - 7, (3 << 19) + 64])
def test_long_messages_at_odd_offsets_and_nothing_beside_them(size: int, granted: bool) -> None:
    """From 4 KiB on bytes are streamed past the cache to where peers read, from 1.5 MiB on to everywhere, in cells of 64 bytes."""
    shards = [random_tensor((size,), torch.uint8, size + rank) for rank in range(2)]
    whole = torch.cat(shards)

    def work(comm: Communicator) -> None:
        make = comm.empty if granted else torch.empty
        room = make((2 * size + 256,), dtype=torch.uint8)
        for offset in (0, 1, 15, 16, 33, 63):
            target = Target(room, 2 * size, offset)
            comm.redistribute(placed(shards[comm.rank], 63 - offset), "n@ -> n", out=target.out)
            assert torch.equal(target.out, whole) and target.intact(), offset
            turned = comm.redistribute(target.out.view(2, size), "a b -> b a@")  # a stride, and no copy over the wire
            assert torch.equal(turned.flatten(), shards[comm.rank])

    with world_of(2, heap_bytes=8 << 20 if granted else 0) as world:
        world.run(work)


@pytest.mark.parametrize("begin", [2**32 - 5, 2**40 - 5, 2**40 + 2**32 - 5])
@pytest.mark.parametrize("regime", REGIMES)
def test_counts_may_pass_any_power_of_two(begin: int, regime: str) -> None:
    """Message numbers wrap at 2^40 in a tag; calls and credits are counted on."""
    shards = [random_tensor((90,), torch.uint8, rank) for rank in range(3)]

    def work(comm: Communicator) -> None:
        make = comm.empty if regime == "direct" else torch.empty
        out = make((270,), dtype=torch.uint8)
        for _ in range(12):
            comm.all_gather_into_tensor(out.zero_(), shards[comm.rank])
            assert same_bits(out, torch.cat(shards))
            total = comm.redistribute(shards[comm.rank], "+n -> n")
            assert same_bits(total, reduce(shards, "sum"))
        assert comm._calls.tie.end.calls > begin + 20

    with world_of(3, regime, teams=2) as world:
        world.run(lambda comm: comm._calls.tie.end.begin_at(begin))
        world.run(work)
