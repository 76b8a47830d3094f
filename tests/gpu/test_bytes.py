"""Any byte count at any byte offset, at any message number, on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator
from purlin_core.reference import reduce
from purlin_core.spec import Op
from tests.core.cases import SUM_DTYPES, numbers
from tests.core.test_bytes import GUARD
from tests.core.worlds import REGIMES, random_tensor, same_bits, same_values
from tests.gpu.devices import DEVICE, WORLDS, gpu_world, settled

pytestmark = pytest.mark.gpu

COUNTS = (1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257)
OFFSETS = range(16)


class Field:
    """Outputs at every offset of 16 bytes, side by side between guards, in one tensor."""

    def __init__(self, room: Tensor, size: int) -> None:
        self.room, self.size = room.fill_(GUARD), size
        self.pitch = -(-(size + 48) // 16) * 16
        self.first = -room.data_ptr() % 16
        self.outs = [self._out(offset) for offset in OFFSETS]

    def _at(self, offset: int) -> int:
        return self.first + offset * self.pitch + 16 + offset

    def _out(self, offset: int) -> Tensor:
        return self.room[self._at(offset) : self._at(offset) + self.size]

    def expected(self, whole: Tensor) -> Tensor:
        room = torch.full_like(self.room, GUARD, device="cpu")
        for offset in OFFSETS:
            room[self._at(offset) : self._at(offset) + self.size] = whole
        return room


def placed(x: Tensor, offset: int) -> Tensor:
    """The same bytes on the GPU, `offset` bytes after an address that is divisible by 64."""
    room = torch.zeros(x.numel() + 128, dtype=torch.uint8, device=DEVICE)
    at = -room.data_ptr() % 64 + offset
    room[at : at + x.numel()] = x.to(DEVICE)
    return room[at : at + x.numel()]


@pytest.mark.parametrize(("ranks", "way"), WORLDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_byte_count_at_every_offset_and_nothing_beside_it(ranks: int, way: str, regime: str) -> None:
    counts = COUNTS if ranks == 2 else COUNTS[:: ranks - 1]
    shards = {n: [random_tensor((n,), torch.uint8, 99 * r + n) for r in range(ranks)] for n in counts}
    room_bytes = 16 * (ranks * max(counts) + 96)

    def prepared(comm: Communicator) -> list[tuple[Field, list[Tensor]]]:
        make = comm.empty if regime == "direct" else partial(torch.empty, device=comm.device)
        rooms = [make((room_bytes,), dtype=torch.uint8) for _ in counts]
        return [
            (Field(room, ranks * n), [placed(shards[n][comm.rank], 15 - offset) for offset in OFFSETS])
            for room, n in zip(rooms, counts, strict=True)
        ]

    def work(comm: Communicator) -> None:
        for field, inputs in fields[comm.rank]:
            for four in range(0, 16, 4):
                comm.exchange(inputs[four : four + 4], "n@ -> n", out=field.outs[four : four + 4])

    with gpu_world(ranks, way, regime, teams=1 + ranks % 2) as world:
        fields = world.run(prepared)
        world.run(work)
        settled(world)
        for mine in fields:
            for (field, _), n in zip(mine, counts, strict=True):
                assert torch.equal(field.room.cpu(), field.expected(torch.cat(shards[n]))), n


@pytest.mark.parametrize("regime", ["packet", "staged"])
@pytest.mark.parametrize("dtype", SUM_DTYPES)
def test_every_length_of_every_dtype_at_every_offset_is_reduced(dtype: torch.dtype, regime: str) -> None:
    size = dtype.itemsize
    op: Op = "max" if size == 8 else "sum"
    lengths = [*range(0, 130 // size, 3 if size == 1 else 1), 63, 64, 65, 200, 257]
    cases = [[numbers((n,), dtype, 2 * n + rank) for rank in range(2)] for n in lengths]

    def prepared(comm: Communicator) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for n, xs in zip(lengths, cases, strict=True):
            room = torch.full((n * size + 64,), GUARD, dtype=torch.uint8, device=comm.device)
            x = placed(xs[comm.rank].view(torch.uint8), 16 - n * size % 16)
            pairs.append((x.view(dtype), room))
        return pairs

    def output(room: Tensor, n: int) -> Tensor:
        at = 16 + n * size % 16
        return room[at : at + n * size].view(dtype)

    def work(comm: Communicator) -> None:
        for n, (x, room) in zip(lengths, pairs[comm.rank], strict=True):
            comm.redistribute(x, "+n -> n", op=op, out=output(room, n))

    with gpu_world(2, "fused", regime, teams=2, slot_bytes=48) as world:
        pairs = world.run(prepared)
        world.run(work)
        settled(world)
        for mine in pairs:
            for n, xs, (_, room) in zip(lengths, cases, mine, strict=True):
                found = room.cpu()
                assert same_values(output(found, n).clone(), reduce(xs, op)), n
                output(found, n).view(torch.uint8).fill_(GUARD)
                assert (found == GUARD).all(), n


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("size", [4097, 70_001, (256 << 10) + 13, (3 << 20) - 7, (24 << 20) + 64])
def test_long_messages_at_odd_offsets(size: int, granted: bool) -> None:
    """With the device's scratch: from packets over a few chunks to bulk copies."""
    shards = [random_tensor((size,), torch.uint8, size + rank) for rank in range(2)]
    whole = torch.cat(shards)
    offsets = (0, 1, 15, 16, 33)

    def prepared(comm: Communicator) -> list[tuple[Tensor, Tensor]]:
        make = comm.empty if granted else partial(torch.empty, device=comm.device)
        room = make((2 * size + 256,), dtype=torch.uint8)
        return [(placed(shards[comm.rank], 63 - offset), room) for offset in offsets]

    with gpu_world(2, heap_bytes=64 << 20 if granted else 0) as world:
        pairs = world.run(prepared)
        for turn, offset in enumerate(offsets):

            def work(comm: Communicator, turn: int = turn, offset: int = offset) -> Tensor:
                x, room = pairs[comm.rank][turn]
                out = room.fill_(GUARD)[16 + offset : 16 + offset + 2 * size]
                comm.redistribute(x, "n@ -> n", out=out)
                return comm.redistribute(out.view(2, size), "a b -> b a@")  # a stride, and no copy over the wire

            turned = world.run(work)
            settled(world)
            for rank in range(2):
                found = pairs[rank][turn][1].cpu()
                assert torch.equal(found[16 + offset : 16 + offset + 2 * size], whole), offset
                assert (found[: 16 + offset] == GUARD).all() and (found[16 + offset + 2 * size :] == GUARD).all()
                assert torch.equal(turned[rank].cpu().flatten(), shards[rank])


@pytest.mark.parametrize("begin", [2**32 - 5, 2**40 - 5])
@pytest.mark.parametrize("regime", REGIMES)
def test_counts_may_pass_any_power_of_two(begin: int, regime: str) -> None:
    shards = [random_tensor((90,), torch.uint8, rank) for rank in range(3)]
    total = reduce(shards, "sum")

    def work(comm: Communicator) -> list[Tensor]:
        x = shards[comm.rank].to(comm.device)
        make = comm.empty if regime == "direct" else partial(torch.empty, device=comm.device)
        outs = [make((270,), dtype=torch.uint8) for _ in range(12)]
        return [t for out in outs for t in (comm.all_gather_into_tensor(out, x), comm.redistribute(x, "+n -> n"))]

    with gpu_world(3, "fused", regime, teams=2) as world:
        world.run(lambda comm: comm._calls.tie.end.begin_at(begin))
        for outs in world.run(work):
            assert all(same_bits(out.cpu(), torch.cat(shards)) for out in outs[::2])
            assert all(same_bits(out.cpu(), total) for out in outs[1::2])
        settled(world)


def test_shapes_that_differ_between_ranks_in_layout_alone() -> None:
    """Local strides are a rank's own business: one passes rows with gaps, the other without, and both kernels are one launch."""
    xs = [random_tensor((6, 8), torch.float32, r) for r in range(2)]

    def work(comm: Communicator) -> Tensor:
        x = xs[comm.rank].to(comm.device)
        wide = torch.zeros(12, 16, device=comm.device)
        wide[::2, ::2] = x
        return comm.redistribute(wide[::2, ::2] if comm.rank else x, "s@ h -> s h@")

    for regime in REGIMES[:2]:
        with gpu_world(2, "fused", regime) as world:
            outs = world.run(work)
            settled(world)
        for rank in range(2):
            assert same_bits(outs[rank].cpu(), torch.cat([x[:, 4 * rank : 4 * rank + 4] for x in xs]))


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("row", [511, 512, 514, 4096, 4099, 70_001])
def test_rows_of_any_length_in_boxes(row: int, granted: bool) -> None:
    """To heads: rows that lie in vectors or do not, shorter and longer than what a warp holds at once, and gaps between them."""
    tokens, heads, gap = 9, 4, 0 if granted else 5  # peers write into what has none
    shards = [random_tensor((tokens, heads, row), torch.uint8, row + rank) for rank in range(2)]
    whole = torch.cat(shards)

    def prepared(comm: Communicator) -> tuple[Tensor, Tensor]:
        make = comm.empty if granted else partial(torch.empty, device=comm.device)
        x = torch.empty((tokens, heads, row + 3), dtype=torch.uint8, device=comm.device)[..., :row]
        out = make((2 * tokens, heads // 2, row + gap), dtype=torch.uint8).fill_(GUARD)
        return x.copy_(shards[comm.rank]), out

    def work(comm: Communicator) -> None:
        x, out = pairs[comm.rank]
        comm.exchange([x], "s@ h d -> s h@ d", out=[out[..., :row]])

    with gpu_world(2, heap_bytes=8 << 20 if granted else 0) as world:
        pairs = world.run(prepared)
        world.run(work)
        settled(world)
        for rank, (_, out) in enumerate(pairs):
            assert torch.equal(out[..., :row].cpu(), whole.chunk(2, 1)[rank])
            assert (out[..., row:] == GUARD).all()
