"""Reduce-scatters of inputs in comm.empty(), which peers read where they lie: the same bits as by any other way, in place and apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator, MismatchError
from purlin_core.spec import Op, Spec
from tests.core.worlds import errors_of, lent, numbers, same_bits, scratch_for, world_of

ROOM = 1 << 20
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def shares(ranks: int, turn: int) -> list[int]:
    """Rows a rank: ragged, and none at times."""
    return [(7 * rank + 31 * turn) % 5 * (turn + 1) for rank in range(ranks)]


def scattered(comm: Communicator, x: Tensor, rows: list[int], op: Op, out: Tensor | None = None) -> Tensor:
    return comm.redistribute(x, "+n -> n@", sizes={"n": rows}, op=op, out=out)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
@pytest.mark.parametrize(("ranks", "teams"), [(1, 1), (2, 1), (2, 3), (3, 2), (4, 3), (5, 1)])
def test_sums_of_lent_inputs_have_the_bits_of_sums_by_rings(ranks: int, teams: int, dtype: torch.dtype) -> None:
    """Each twice: into another tensor, into none, and into the rank's own part of its input; all else of an input stays what it was."""
    ops: tuple[Op, ...] = ("sum", "avg", "max", "min") if dtype.is_floating_point else ("sum", "max", "min")
    cases = [
        ([numbers(sum(rows), dtype, 9 * turn + rank) for rank in range(ranks)], rows, op)
        for turn, rows in enumerate(
            [*(shares(ranks, turn) for turn in range(4)), [200 + rank for rank in range(ranks)]]
        )
        for op in ops
    ]

    def by_rings(comm: Communicator) -> list[Tensor]:
        return [scattered(comm, inputs[comm.rank], rows, op) for inputs, rows, op in cases]

    def work(comm: Communicator) -> None:
        for (inputs, rows, op), part in zip(cases, wanted[comm.rank], strict=True):
            mine, first = inputs[comm.rank], sum(rows[: comm.rank])
            own = slice(first, first + rows[comm.rank])
            for _ in range(2):
                x = lent(comm, mine)
                assert same_bits(scattered(comm, x, rows, op), part) and same_bits(x, mine)
                out = torch.empty_like(part)
                assert same_bits(scattered(comm, x, rows, op, out), part) and same_bits(x, mine)
                scattered(comm, x, rows, op, x[own])
                assert same_bits(x[own], part)
                assert same_bits(x[: own.start], mine[: own.start]) and same_bits(x[own.stop :], mine[own.stop :])
        assert set(comm.stats().regimes) == {"packet" if ranks == 1 else "direct"}

    with world_of(ranks, "staged", teams=teams) as world:
        wanted = world.run(by_rings)
    with world_of(ranks, "direct", teams=teams, heap_bytes=ROOM) as world:
        world.run(work)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_they_may_begin_anywhere_in_the_heap(dtype: torch.dtype) -> None:
    """Views of tensors there, at other offsets on each rank and turn."""
    ranks = 3
    inputs = [numbers(333, dtype, rank) for rank in range(ranks)]
    parts = Spec.parse("+n -> n@").reference(inputs)

    def work(comm: Communicator) -> None:
        for turn in range(5):
            before = (turn * 3 + comm.rank * 2) % 9
            x = comm.empty((350,), dtype)[before : before + 333].copy_(inputs[comm.rank])
            assert same_bits(comm.redistribute(x, "+n -> n@"), parts[comm.rank])

    with world_of(ranks, "direct", teams=2) as world:
        world.run(work)


def test_an_input_may_be_written_as_soon_as_its_call_has_ended() -> None:
    """Peers have read it by then, however far behind they are; and other calls may stand between."""
    ranks = 3

    def work(comm: Communicator) -> None:
        x, part = comm.empty((90,)), torch.zeros(30)
        for turn in range(60):
            x.fill_(turn + comm.rank)
            comm.reduce_scatter_tensor(part, x)
            x.fill_(-1)
            assert (part == 3 * turn + 3).all()
            if turn % 2:  # into what was just lent, on some ranks
                comm.all_gather_into_tensor(x if turn % 3 == comm.rank else comm.empty((90,)), part)

    with world_of(ranks, "direct", teams=2) as world:
        world.run(work)


def test_results_that_calls_make_granted_are_ordinary_of_these() -> None:
    def work(comm: Communicator) -> None:
        x = lent(comm, torch.ones(600))
        for _ in range(3):
            assert (comm.redistribute(x, "+n -> n@") == 2).all()
        assert comm.stats().regimes == {"direct": 3}

    with world_of(2, "direct", granted_results=True, heap_bytes=4096) as world:  # which has room for the input alone
        world.run(work)


def test_explain_says_so() -> None:
    with world_of(2, "direct", teams=2) as world:
        for text in world.run(lambda comm: comm.plan([comm.empty((300,))], "+n -> n@").explain()):
            assert "of inputs that are lent\ndirect, 2 team(s), lag 0, 1 step(s): the inputs lie in memory" in text, (
                text
            )


@pytest.mark.parametrize(
    ("specs", "shape", "regime"),
    [
        (["+a b -> a@ b"], (4, 6), "direct"),
        (["+a b -> a b@"], (1, 6), "direct"),
        (["+a b -> a b@"], (4, 6), "staged"),
        (["+a b -> b a@"], (4, 6), "staged"),
        (["+a b -> a@ b", "+a b -> a@ b"], (4, 6), "staged"),
    ],
)
def test_a_part_that_is_one_stretch_of_one_input_is_read(specs: list[str], shape: tuple[int, int], regime: str) -> None:
    xs = [[numbers(shape[0] * 6, torch.float32, 5 * r + i).reshape(shape) for i in range(len(specs))] for r in range(2)]

    def work(comm: Communicator) -> list[Tensor]:
        outs = comm.exchange([lent(comm, x) for x in xs[comm.rank]], specs)
        assert comm.stats().regimes == {regime: 1}
        return outs

    with world_of(2, "direct") as world:
        for rank, outs in enumerate(world.run(work)):
            for i, out in enumerate(outs):
                assert same_bits(out, Spec.parse(specs[i]).reference([x[i] for x in xs])[rank])


@pytest.mark.parametrize("teams", [1, 2])
def test_a_rank_whose_input_lies_elsewhere_is_named(teams: int) -> None:
    def work(comm: Communicator) -> None:
        x = torch.ones(900) if comm.rank == 1 else comm.empty((900,)).fill_(1)
        comm.reduce_scatter_tensor(torch.empty(300), x)

    with world_of(3, scratch=scratch_for("direct", teams=teams, slot_bytes=4096), heap_bytes=ROOM) as world:
        errors = errors_of(world, work)
    for error in errors:
        assert type(error) is MismatchError and "rank 1 called" in str(error), error
        assert "They differ in where the input lies alone" in str(error), error
