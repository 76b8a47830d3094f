"""Large calls, whose teams have a block for each role: the same bytes and sums, apart and in place, beside calls of one block a team."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator, MismatchError
from purlin_core.spec import Spec
from purlin_core.tune import Regime, cuda_scratch
from tests.core.worlds import errors_of, random_tensor, same_bits
from tests.gpu.devices import DEVICE, gpu_world, settled

pytestmark = pytest.mark.gpu

# Of a rank: no power of two, and 12 divides both. Sums of int16 are exact.
ROWS, WIDTH = 1020, 4212
SPECS = ("r@ c -> r c", "r@ c -> r c@", "+r c -> r c", "+r c -> r@ c", "r@ c -> c r")
HEAP_BYTES = 96 << 20
# From here on boxes go by bulk copies (csrc/cuda/direct.cu): bytes a team of a rank's tensor, half of which goes to its peer.
BULK_TEAM_BYTES = 256 << 10


def inputs_of(turn: int) -> list[Tensor]:
    return [random_tensor((ROWS, WIDTH), torch.int16, 10 * turn + rank) // 2 for rank in range(2)]


@pytest.mark.parametrize("way", ["fused", "streams"])
@pytest.mark.parametrize("granted", [False, True])
def test_large_calls_have_two_blocks_a_team_and_the_bits_of_their_specs(way: str, granted: bool) -> None:
    """Twice each: the second call comes behind the first without a pause."""
    with gpu_world(2, way, heap_bytes=HEAP_BYTES * granted) as world:
        for spec in SPECS:
            turns = [inputs_of(turn) for turn in range(2)]
            wanted = [Spec.parse(spec).reference(turn) for turn in turns]
            placed = [[x.to(DEVICE) for x in turn] for turn in turns]

            def call(comm: Communicator, spec: str = spec, placed: list[list[Tensor]] = placed) -> list[Tensor]:
                mine = [turn[comm.rank] for turn in placed]
                shape = comm.plan([mine[0]], spec, call="redistribute").out_shapes[0]
                outs = [
                    comm.empty(shape, torch.int16) if granted else torch.empty(shape, dtype=torch.int16, device=DEVICE)
                    for _ in mine
                ]
                for x, out in zip(mine, outs, strict=True):
                    comm.redistribute(x, spec, out=out)
                return outs

            results = world.run(call)
            settled(world)
            for rank, outs in enumerate(results):
                for out, whole in zip(outs, wanted, strict=True):
                    assert same_bits(out.cpu(), whole[rank]), f"{spec}, rank {rank}"
                del outs
            del results
            # A block for each of three roles, of 32 teams of two ranks, would be more than a GPU holds.
            assert world.communicators[0].plan([placed[0][0]], spec).schedule.parts == 2


@pytest.mark.parametrize("way", ["fused", "streams"])
@pytest.mark.parametrize("size", [3 << 18, (9 << 20) + 3])
def test_of_two_ranks_one_may_sum_in_place_and_one_apart(size: int, way: str) -> None:
    """Through rings: what it does at home is every rank's own business."""
    xs = [random_tensor((size,), torch.int32, rank) // 2 for rank in range(2)]
    placed = [x.to(DEVICE) for x in xs]
    apart = torch.empty_like(placed[1])
    with gpu_world(2, way) as world:

        def call(comm: Communicator) -> Tensor:
            x = placed[comm.rank]
            return comm.redistribute(x, "+n -> n", out=(x, apart)[comm.rank])

        outs = world.run(call)
        settled(world)
        assert set(world.communicators[0].stats().regimes) == {"staged"}
        assert all(same_bits(out.cpu(), xs[0] + xs[1]) for out in outs)


@pytest.mark.parametrize("granted", [False, True])
def test_large_calls_in_place(granted: bool) -> None:
    """A gather into where a rank's own rows lie already, and a sum onto itself."""
    xs = inputs_of(7)
    with gpu_world(2, heap_bytes=HEAP_BYTES * granted) as world:

        def call(comm: Communicator) -> tuple[Tensor, Tensor]:
            shape = (2 * ROWS, WIDTH)
            out = comm.empty(shape, torch.int16) if granted else torch.empty(shape, dtype=torch.int16, device=DEVICE)
            mine = out[comm.rank * ROWS : (comm.rank + 1) * ROWS]
            mine.copy_(xs[comm.rank])
            comm.all_gather_into_tensor(out, mine)
            total = xs[comm.rank].to(DEVICE)
            comm.all_reduce(total)
            return out, total

        results = world.run(call)
        settled(world)
        for whole, total in results:
            assert same_bits(whole.cpu(), torch.cat(xs))
            assert same_bits(total.cpu(), xs[0] + xs[1])


@pytest.mark.parametrize("way", ["fused", "streams"])
def test_copies_through_rings_have_a_third_block_for_what_stays_at_home(way: str) -> None:
    xs = inputs_of(3)
    placed = [x.to(DEVICE) for x in xs]
    with gpu_world(2, way, scratch=replace(cuda_scratch(2), teams=8)) as world:
        for spec in ("r@ c -> r c", "r@ c -> r c@", "r@ c -> c r"):

            def call(comm: Communicator, spec: str = spec) -> tuple[int, list[Tensor]]:
                parts = comm.plan([placed[comm.rank]], spec, call="redistribute").schedule.parts
                return parts, [comm.redistribute(placed[comm.rank], spec) for _ in range(2)]

            results = world.run(call)
            settled(world)
            wanted = Spec.parse(spec).reference(xs)
            for rank, (parts, outs) in enumerate(results):
                assert parts == 3
                assert all(same_bits(out.cpu(), wanted[rank]) for out in outs), f"{spec}, rank {rank}"


@pytest.mark.parametrize("granted", [False, True])
def test_tensors_may_end_oddly_amid_what_bulk_copies_carry(granted: bool) -> None:
    """They begin at multiples of 16 bytes, so the call goes by bulk copies: stretches of tensors, or through rings chunks with an end amid them."""
    counts = (1 << 20, (1 << 20) + (48 << 10) + 3)
    xs = [[random_tensor((count,), torch.uint8, 2 * rank + k) for k in range(2)] for rank, count in enumerate(counts)]
    placed = [[x.to(DEVICE) for x in mine] for mine in xs]
    with gpu_world(2, heap_bytes=HEAP_BYTES * granted, scratch=replace(cuda_scratch(2), teams=4)) as world:

        def call(comm: Communicator) -> list[Tensor]:
            out = [comm.empty((sum(counts),), torch.uint8) for _ in range(2)] if granted else None
            return comm.exchange(placed[comm.rank], "n@ -> n", sizes={"n": counts}, out=out)

        results = world.run(call)
        settled(world)
        for outs in results:
            for k, out in enumerate(outs):
                assert torch.equal(out.cpu(), torch.cat([mine[k] for mine in xs]))


@pytest.mark.parametrize("spec", ["r@ c -> r c@", "r c@ -> r@ c", "h@ r c -> r h c"])  # the last: runs of 64 bytes
def test_outputs_of_peers_may_begin_where_bulk_copies_do_not_reach(spec: str) -> None:
    """A rank whose own tensors begin at multiples of 16 bytes sends boxes in bulk, and loads them before it hears where they go. Of ranks that launch
    together none would: one kernel must fit all."""
    shape = (4, 1 << 15, 32) if "h" in spec else (1 << 10, 1 << 12)
    xs = [random_tensor(shape, torch.int16, rank) for rank in range(2)]
    wanted = Spec.parse(spec).reference(xs)
    with gpu_world(2, "streams", heap_bytes=48 << 20) as world:

        def call(comm: Communicator, odd: int) -> Tensor:
            x, mine = xs[comm.rank].to(DEVICE), wanted[comm.rank]
            first = comm.rank == odd
            out = comm.empty((first + mine.numel(),), torch.int16)[first:].view(mine.shape)
            schedule = comm.plan([x], spec, out=[out]).schedule
            assert schedule.regime is Regime.DIRECT and x.nbytes >= schedule.teams * BULK_TEAM_BYTES
            return comm.redistribute(x, spec, out=out)

        for odd in (1, 0, 2):
            results = world.run(partial(call, odd=odd))
            settled(world)
            assert all(same_bits(out.cpu(), one) for out, one in zip(results, wanted, strict=True)), odd


@pytest.mark.parametrize("way", ["fused", "streams"])
def test_a_rank_in_place_and_one_apart_have_blocks_of_their_own_count(way: str) -> None:
    """The one in place copies nothing at home: two blocks a team, beside three; in one launch two for both."""
    xs = inputs_of(5)
    wholes = [torch.empty((2 * ROWS, WIDTH), dtype=torch.int16, device=DEVICE) for _ in xs]
    mine = [wholes[0][:ROWS], torch.empty((ROWS, WIDTH), dtype=torch.int16, device=DEVICE)]
    for x, there in zip(xs, mine, strict=True):
        there.copy_(x)
    with gpu_world(2, way, scratch=replace(cuda_scratch(2), teams=8)) as world:

        def call(comm: Communicator) -> None:
            for _ in range(2):
                comm.all_gather_into_tensor(wholes[comm.rank], mine[comm.rank])

        world.run(call)
        settled(world)
        assert all(same_bits(whole.cpu(), torch.cat(xs)) for whole in wholes)


@pytest.mark.parametrize("blocks", [1, 8, 17])
def test_calls_within_a_budget_take_no_more_blocks_and_move_the_same_bytes(blocks: int) -> None:
    with gpu_world(2, heap_bytes=64 << 20) as world:
        xs = [random_tensor((ROWS, WIDTH), torch.int16, rank) for rank in range(2)]

        def call(comm: Communicator) -> list[Tensor]:
            mine, out = xs[comm.rank].to(comm.device), comm.empty((2 * ROWS, WIDTH), torch.int16)
            with comm.budget(blocks):
                assert comm.plan([mine], "r@ c -> r c").schedule.ctas <= blocks
                few = comm.redistribute(mine, "r@ c -> r c")
                comm.all_gather_into_tensor(out, mine)
            return [few, out, comm.redistribute(mine, "r@ c -> r c")]

        results = world.run(call)
        settled(world)
        assert all(same_bits(whole.cpu(), torch.cat(xs)) for wholes in results for whole in wholes)


def test_ranks_with_different_budgets_are_named() -> None:
    with gpu_world(2) as world:
        x = torch.zeros(ROWS, WIDTH, dtype=torch.int16, device=DEVICE)

        def call(comm: Communicator) -> None:
            with comm.budget(4 + comm.rank):
                comm.redistribute(x, "r@ c -> r c")
            torch.cuda.synchronize()
            comm.check()

        assert all(type(error) is MismatchError for error in errors_of(world, call))


def test_explicit_teams_are_a_budget_of_blocks() -> None:
    with gpu_world(2, teams=8) as world:
        x = torch.zeros(ROWS, WIDTH, dtype=torch.int16, device=DEVICE)
        assert world.communicators[0].plan([x], "r@ c -> r c").schedule.ctas == 8
