"""All-reduces in granted outputs, which peers read and write where they lie: the same bits as by any other way, in place and apart."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator, MismatchError
from purlin_core.spec import Op, Spec
from tests.core.worlds import errors_of, lent, numbers, same_bits, scratch_for, spread, world_of

ROOM = 1 << 20
SIZES = (0, 1, 7, 30, 1001)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def by_rings(inputs: list[Tensor], op: Op) -> Tensor:
    with world_of(len(inputs), "staged") as world:
        return world.run(lambda comm: comm.redistribute(inputs[comm.rank], "+n -> n", op=op))[0]


@pytest.mark.parametrize("dtype", FLOATS + INTS)
@pytest.mark.parametrize(("ranks", "teams"), [(1, 1), (2, 1), (2, 3), (3, 2), (4, 3), (5, 1)])
def test_sums_in_granted_outputs_have_the_bits_of_sums_by_rings(ranks: int, teams: int, dtype: torch.dtype) -> None:
    """Each twice: in place, into another tensor, and from a tensor with gaps; an input apart stays what it was."""
    ops: tuple[Op, ...] = ("sum", "avg", "max", "min") if dtype.is_floating_point else ("sum", "max", "min")
    cases = [([numbers(size, dtype, 9 * size + rank) for rank in range(ranks)], op) for size in SIZES for op in ops]

    def by_rings(comm: Communicator) -> list[Tensor]:
        return [comm.redistribute(inputs[comm.rank], "+n -> n", op=op) for inputs, op in cases]

    def work(comm: Communicator) -> None:
        for (inputs, op), whole in zip(cases, wanted, strict=True):
            mine = inputs[comm.rank]
            for _ in range(2):
                x = lent(comm, mine)
                assert comm.all_reduce(x, op) is x and same_bits(x, whole)
                for apart in (mine.clone(), spread(mine)):
                    out = comm.empty(mine.shape, mine.dtype)
                    comm.redistribute(apart, "+n -> n", op=op, out=out)
                    assert same_bits(out, whole) and same_bits(apart.contiguous(), mine)
        used = {name for name, calls in comm.stats().regimes.items() if calls}
        assert used == ({"packet"} if ranks == 1 else {"packet", "direct"})  # packets: of nothing

    with world_of(ranks, "staged", teams=teams) as world:
        wanted = world.run(by_rings)[0]
    with world_of(ranks, "direct", teams=teams, heap_bytes=ROOM) as world:
        world.run(work)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_tensors_of_any_rank_may_be_inputs_too(ranks: int) -> None:
    """Where a rank has its contributions is its own business: some in place, some apart, at other places of their heaps each time."""
    inputs = [numbers(1001, torch.float32, rank) for rank in range(ranks)]

    def work(comm: Communicator) -> list[Tensor]:
        outs = []
        for turn in range(6):
            aside = comm.empty(((turn * 7 + comm.rank * 3) % 5 * 100,))
            out = comm.empty((1001,))
            in_place = (turn >> comm.rank % 2) % 2 == 0
            x = out.copy_(inputs[comm.rank]) if in_place else inputs[comm.rank]
            outs.append(comm.redistribute(x, "+n -> n", out=out))
            del aside
        return outs

    with world_of(ranks, "direct") as world:
        results = world.run(work)
    wanted = Spec.parse("+n -> n").reference(inputs)[0]
    assert all(same_bits(out, wanted) for outs in results for out in outs)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_they_may_begin_and_end_anywhere_in_the_heap(dtype: torch.dtype) -> None:
    """Views of granted tensors, at other offsets on each rank; what lies beside them is left alone."""
    inputs = [numbers(333, dtype, rank) for rank in range(3)]
    wanted = Spec.parse("+n -> n").reference(inputs)[0]

    def work(comm: Communicator) -> None:
        for turn in range(5):
            whole = comm.empty((350,), dtype).fill_(7)
            before = (turn * 3 + comm.rank * 2) % 9
            x = whole[before : before + 333]
            x.copy_(inputs[comm.rank])
            comm.all_reduce(x)
            assert same_bits(x, wanted)
            assert (whole[:before] == 7).all() and (whole[before + 333 :] == 7).all()

    with world_of(3, "direct", teams=2) as world:
        world.run(work)


def test_other_calls_may_stand_between() -> None:
    """Gathers into the tensor that was just summed, sums of what was just gathered, and rings, without a pause."""
    ranks = 3

    def work(comm: Communicator) -> None:
        x, y = comm.empty((30 * ranks,)), torch.zeros(30)
        for turn in range(40):
            x.fill_(comm.rank + turn)
            comm.all_reduce(x)
            assert (x == 3 * turn + 3).all()
            comm.reduce_scatter_tensor(y, x)
            assert (y == 9 * turn + 9).all()
            comm.all_gather_into_tensor(x, y + comm.rank)
            comm.all_reduce(x)
            wanted = torch.arange(ranks).repeat_interleave(30) * ranks + 3.0 * (9 * turn + 9)
            assert same_bits(x, wanted)

    with world_of(ranks, "direct", teams=2) as world:
        world.run(work)


def test_explain_says_so() -> None:
    def work(comm: Communicator) -> str:
        x = comm.empty((300,))
        return comm.plan([x], "+n -> n", out=[x]).explain()

    with world_of(2, "direct", teams=2) as world:
        for text in world.run(work):
            assert "into granted outputs\ndirect, 2 team(s), lag 0, 1 step(s): the outputs lie in memory" in text, text


@pytest.mark.parametrize("specs", [["+a b -> b a"], ["+a b -> a b", "+a b -> a b"]])
def test_sums_of_several_tensors_and_into_another_order_go_through_rings(specs: list[str]) -> None:
    xs = [[numbers(12, torch.float32, 5 * rank + i).reshape(3, 4) for i in range(len(specs))] for rank in range(2)]

    def work(comm: Communicator) -> list[Tensor]:
        outs = [comm.empty((4, 3) if spec.endswith("b a") else (3, 4)) for spec in specs]
        comm.exchange(xs[comm.rank], specs, out=outs)
        assert comm.stats().regimes == {"staged": 1}
        return outs

    with world_of(2, "direct") as world:
        for outs in world.run(work):
            for i, out in enumerate(outs):
                assert same_bits(out, Spec.parse(specs[i]).reference([x[i] for x in xs])[0])


def test_a_plan_whose_peers_have_several_stretches_is_refused() -> None:
    with world_of(2, "direct") as world:
        comm = world.communicators[0]
        x = comm.empty((64,))
        arguments = comm.plan([x], "+n -> n", out=[x]).arguments
        with pytest.raises(ValueError, match="in one stretch only"):
            comm._calls.tie.site.plan({**arguments, "remote": [[0, 128, 0, 0, 0, 64, 0, 0, 64, 128, 64, 0]]})


ODD: dict[str, tuple[Callable[[Communicator], object], str]] = {
    "place": (lambda comm: comm.all_reduce(torch.ones(900)), "into granted outputs"),
    "size": (lambda comm: comm.all_reduce(comm.empty((901,)).fill_(1)), "901"),
    "dtype": (lambda comm: comm.all_reduce(comm.empty((900,), torch.int32).fill_(1)), "int32"),
    "op": (lambda comm: comm.all_reduce(comm.empty((900,)).fill_(1), "max"), "max"),
    "call": (lambda comm: comm.all_gather_into_tensor(comm.empty((900,)), torch.ones(300)), "all_gather_into_tensor"),
}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("teams", [1, 2])
def test_a_rank_that_disagrees_is_named(what: str, teams: int) -> None:
    odd, word = ODD[what]

    def work(comm: Communicator) -> None:
        (odd if comm.rank == 1 else lambda comm: comm.all_reduce(comm.empty((900,)).fill_(1)))(comm)

    with world_of(3, scratch=scratch_for("direct", teams=teams, slot_bytes=4096), heap_bytes=ROOM) as world:
        began = time.monotonic()
        errors = errors_of(world, work)
        assert time.monotonic() - began < 5
    for error in errors:
        assert type(error) is MismatchError and "rank 1 called" in str(error) and word in str(error), error
        assert ("on all ranks, or on none" in str(error)) is (what == "place"), error
