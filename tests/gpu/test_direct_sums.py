"""All-reduces in granted outputs, reduce-scatters of lent inputs: the bits of the reference, in place and apart, eager and replayed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator, LocalWorld
from purlin_core.spec import Op, Spec
from purlin_core.tune import Regime
from tests.core.worlds import lent, numbers, same_values, spread
from tests.gpu.devices import DEVICE, WORLDS, captured, gpu_world, settled

pytestmark = pytest.mark.gpu

ROOM = 64 << 20
ODD = (1, 7, 300, 1001, 8192, 100_003)  # elements
LARGE = tuple(k << 10 for k in (64, 256, 1024, 2048, 7168, 16384))  # bytes
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32)


def reference(inputs: list[Tensor], op: Op) -> Tensor:
    return Spec.parse("+n -> n").reference(inputs, op=op)[0]


def summed(world: LocalWorld, pairs: list[list[tuple[Tensor, Tensor]]], op: Op) -> None:
    """What each rank passes, one call behind the other."""

    def call(comm: Communicator) -> None:
        for x, out in pairs[comm.rank]:
            comm.redistribute(x, "+n -> n", op=op, out=out)

    torch.cuda.synchronize()
    world.run(call)
    settled(world)
    plans = [comm._calls.last for comm in world.communicators]
    assert all(plan is not None and plan.schedule.regime is Regime.DIRECT for plan in plans)


def pairs_of(comm: Communicator, mine: Tensor) -> list[tuple[Tensor, Tensor]]:
    """In place, from another tensor, and from one with gaps; each twice."""
    there = mine.to(comm.device)
    places = [lent(comm, mine) for _ in range(2)]
    apart = [(x, comm.empty(mine.shape, mine.dtype)) for x in (there, there, spread(there), spread(there))]
    return [*((x, x) for x in places), *apart]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "way"), WORLDS)
def test_sums_are_those_of_the_reference(ranks: int, way: str, dtype: torch.dtype) -> None:
    ops: tuple[Op, ...] = ("sum", "avg", "max") if dtype.is_floating_point else ("sum", "min")
    with gpu_world(ranks, way, "direct", teams=4, slot_bytes=4096, heap_bytes=ROOM) as world:
        for size in ODD:
            inputs = [numbers(size, dtype, 9 * size + rank) for rank in range(ranks)]
            for op in ops:
                pairs = world.run(lambda comm, inputs=inputs: pairs_of(comm, inputs[comm.rank]))  # type: ignore[misc]
                summed(world, pairs, op)
                wanted = reference(inputs, op)
                for rank, mine in enumerate(pairs):
                    for k, (_, out) in enumerate(mine):
                        assert same_values(out.cpu(), wanted), f"rank {rank}, pair {k}, {size} of {dtype}, {op}"
                del pairs, mine, out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("ranks", "way"), [(2, "fused"), (2, "streams"), (4, "fused")])
def test_large_sums_too(ranks: int, way: str, dtype: torch.dtype) -> None:
    """Up to 16 MiB a rank, and odd sizes beside them."""
    with gpu_world(ranks, way, "direct", teams=16, slot_bytes=4096, heap_bytes=ROOM) as world:
        for size in LARGE:
            for count in (size // dtype.itemsize, size // dtype.itemsize + 3):
                inputs = [numbers(count, dtype, count + rank) for rank in range(ranks)]
                xs = world.run(lambda comm, inputs=inputs: lent(comm, inputs[comm.rank]))  # type: ignore[misc]
                summed(world, [[(x, x)] for x in xs], "sum")
                assert all(same_values(x.cpu(), reference(inputs, "sum")) for x in xs), f"{count} of {dtype}"
                del xs


def scattered(world: LocalWorld, inputs: list[Tensor], rows: list[int], op: Op, *, in_place: bool) -> list[Tensor]:
    """Each rank's part, of inputs that are lent; what else lies in them is left alone."""
    xs = world.run(lambda comm: lent(comm, inputs[comm.rank]))
    torch.cuda.synchronize()

    def call(comm: Communicator) -> Tensor:
        first = sum(rows[: comm.rank])
        out = xs[comm.rank][first : first + rows[comm.rank]] if in_place else None
        return comm.redistribute(xs[comm.rank], "+n -> n@", sizes={"n": rows}, op=op, out=out)

    parts = [part.clone() for part in world.run(call)]
    settled(world)
    plans = [comm._calls.last for comm in world.communicators]
    assert all(plan is not None and plan.schedule.regime is Regime.DIRECT for plan in plans)
    for rank, (x, mine) in enumerate(zip(xs, inputs, strict=True)):
        own = sum(rows[:rank]), sum(rows[: rank + 1])
        assert same_values(x[: own[0]].cpu(), mine[: own[0]]) and same_values(x[own[1] :].cpu(), mine[own[1] :])
    return parts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "way"), WORLDS)
def test_parts_of_lent_inputs_are_those_of_the_reference(ranks: int, way: str, dtype: torch.dtype) -> None:
    """Even and ragged ones, and of ranks that have none; some begin between two vectors."""
    ops: tuple[Op, ...] = ("sum", "avg", "max") if dtype.is_floating_point else ("sum", "min")
    with gpu_world(ranks, way, "direct", teams=4, slot_bytes=4096, heap_bytes=ROOM) as world:
        for size in ODD:
            for rows in ([size] * ranks, [size * (rank % 3) // 2 + (rank == 1) for rank in range(ranks)]):
                inputs = [numbers(sum(rows), dtype, 9 * size + rank) for rank in range(ranks)]
                for turn, op in enumerate(ops):
                    parts = scattered(world, inputs, rows, op, in_place=turn % 2 == 1)
                    wanted = Spec.parse("+n -> n@").reference(inputs, sizes={"n": rows}, op=op)
                    for rank, part in enumerate(parts):
                        assert same_values(part.cpu(), wanted[rank]), f"rank {rank}, {rows} of {dtype}, {op}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("ranks", "way"), [(2, "fused"), (2, "streams"), (4, "fused")])
def test_large_parts_too(ranks: int, way: str, dtype: torch.dtype) -> None:
    with gpu_world(ranks, way, "direct", teams=16, slot_bytes=4096, heap_bytes=ROOM) as world:
        for size in LARGE:
            rows = [size // dtype.itemsize // ranks] * ranks
            inputs = [numbers(sum(rows), dtype, size + rank) for rank in range(ranks)]
            wanted = Spec.parse("+n -> n@").reference(inputs)
            for in_place in (False, True):
                parts = scattered(world, inputs, rows, "sum", in_place=in_place)
                assert all(same_values(part.cpu(), part_of) for part, part_of in zip(parts, wanted, strict=True)), size


@pytest.mark.parametrize("ranks", [2, 4])
def test_replays_read_what_lies_there_now(ranks: int) -> None:
    """What a rank writes right behind a call is not what its peers have read."""
    size = 40_000
    with gpu_world(ranks, "fused", "direct", teams=4, slot_bytes=4096) as world:
        given = [torch.zeros(size * ranks, device=DEVICE) for _ in range(ranks)]
        xs = world.run(lambda comm: comm.empty((size * ranks,)))
        outs = [torch.zeros(2, size, device=DEVICE) for _ in range(ranks)]

        def chain(comm: Communicator) -> None:
            x, out = xs[comm.rank], outs[comm.rank]
            x.copy_(given[comm.rank])
            comm.reduce_scatter_tensor(out[0], x)
            x.mul_(2)
            comm.reduce_scatter_tensor(out[1], x)
            x.fill_(-1)

        world.run(chain)
        graph, _ = captured(world, chain)
        for turn in range(20):
            for rank, x in enumerate(given):
                x.copy_(torch.arange(size * ranks, device=DEVICE) % 97 + turn + rank)
            graph.replay()
            torch.cuda.synchronize()
            parts = torch.stack(given).sum(0).chunk(ranks)
            assert all(torch.equal(out, torch.stack((part, 2 * part))) for out, part in zip(outs, parts, strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("dtype", "op"), [(torch.bfloat16, "sum"), (torch.float32, "sum"), (torch.float16, "max"), (torch.uint8, "sum")]
)
def test_outputs_may_begin_anywhere_in_the_heap(ranks: int, dtype: torch.dtype, op: Op) -> None:
    """Views at other offsets on each rank, so that some lie in vectors and others do not; what lies beside them is left alone."""
    inputs = [numbers(5001, dtype, rank) for rank in range(ranks)]
    wanted = reference(inputs, op)
    with gpu_world(ranks, "fused", "direct", teams=3, slot_bytes=4096) as world:
        for turn in range(6):
            befores = [8 if turn == 0 else (turn * 3 + rank * 2) % 9 for rank in range(ranks)]
            wholes = world.run(lambda comm: comm.empty((5020,), dtype).fill_(7))
            xs = [whole[before : before + 5001] for whole, before in zip(wholes, befores, strict=True)]
            for x, mine in zip(xs, inputs, strict=True):
                x.copy_(mine)
            summed(world, [[(x, x)] for x in xs], op)
            for x, whole, before in zip(xs, wholes, befores, strict=True):
                assert same_values(x.cpu(), wanted)
                assert (whole[:before] == 7).all() and (whole[before + 5001 :] == 7).all()
            del wholes, whole, xs, x


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_replays_sum_what_lies_there_now(ranks: int) -> None:
    """A chain of sums in one graph: in place, and from another tensor; new inputs before each replay, eager calls between."""
    size = 40_000
    with gpu_world(ranks, "fused", "direct", teams=4, slot_bytes=4096) as world:
        xs = [torch.zeros(size, device=DEVICE) for _ in range(ranks)]
        outs = world.run(lambda comm: (comm.empty((size,)), comm.empty((size,))))

        def chain(comm: Communicator) -> None:
            first, second = outs[comm.rank]
            comm.redistribute(xs[comm.rank], "+n -> n", out=first)
            second.copy_(first)
            comm.all_reduce(second)
            comm.all_reduce(second)

        world.run(chain)
        graph, _ = captured(world, chain)
        for turn in range(30):
            for rank, x in enumerate(xs):
                x.copy_(torch.arange(size, device=DEVICE) % 97 + turn + rank)
            if turn % 5 == 4:
                world.run(chain)
            else:
                graph.replay()
            total = torch.stack(xs).sum(0)
            for first, second in outs:
                assert torch.equal(first, total) and torch.equal(second, total * ranks**2), turn
        settled(world)


def test_large_ones_are_direct_where_nobody_says_how() -> None:
    with gpu_world(2, heap_bytes=ROOM) as world:
        comm = world.communicators[0]
        x = comm.empty((4 << 20,), torch.bfloat16)
        schedule = comm.plan([x], "+n -> n", out=[x]).schedule
        assert schedule.regime is Regime.DIRECT and schedule.parts == 1
