"""The collectives as operators: what a compiler is told of them is what they do, and a compiled graph holds them whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from purlin_core import ClosedError, Communicator, LocalWorld
from tests.core.worlds import random_tensor, same_bits, world_of

# spec, shape of the input, names with sizes, sizes: how many a name has and then they, 0 for a whole length
CASES: list[tuple[str, tuple[int, ...], list[str], list[int]]] = [
    ("n@ -> n", (3,), [], []),
    ("s@ h d -> s h@ d", (3, 4, 2), [], []),
    ("+a b -> b a@", (4, 3), [], []),
    ("+a b -> a b", (4, 3), [], []),
    ("y@ x -> y@~1:0 x", (2, 3), [], []),
    ("(t i@) h -> (i t) h", (5, 2), ["t"], [0, 3]),
]


def call(comm: Communicator, op: str, x: Tensor, case: tuple[str, tuple[int, ...], list[str], list[int]]) -> list[Any]:
    return [comm.id, [x], [case[0]], case[2], case[3], op, ""]


@pytest.fixture(scope="module")
def one() -> LocalWorld:
    with world_of(1) as made:
        yield made  # type: ignore[misc]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_the_operators_are_what_they_say(case: Any, one: LocalWorld) -> None:
    """torch.library's own examination: schema (what is mutated, what aliases), fake kernels, dispatch under autograd and AOT."""
    comm = one.communicators[0]
    arguments = call(comm, "sum", random_tensor(case[1], torch.float32, 0).nan_to_num(), case)
    opcheck(torch.ops.purlin.exchange.default, arguments)
    out = torch.ops.purlin.exchange(*arguments)
    opcheck(torch.ops.purlin.exchange_into.default, [*arguments, out])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_fake_outputs_are_like_the_real_ones(case: Any, dtype: torch.dtype, ranks: int) -> None:
    shape = (ranks * case[1][0], *case[1][1:]) if case[0].startswith("+") else case[1]
    shape = (*shape[:1], ranks * shape[1], *shape[2:]) if "h@" in case[0] else shape

    def work(comm: Communicator) -> list[Tensor]:
        return [*torch.ops.purlin.exchange(*call(comm, "sum", torch.ones(shape, dtype=dtype), case))]

    with world_of(ranks) as world:
        for comm, real in zip(world.communicators, world.run(work), strict=True):
            with FakeTensorMode():
                fake = torch.ops.purlin.exchange(*call(comm, "sum", torch.ones(shape, dtype=dtype), case))
            assert [(x.shape, x.dtype, x.stride()) for x in fake] == [(x.shape, x.dtype, x.stride()) for x in real]


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_whole_graph_is_compiled_and_does_what_eager_does(ranks: int) -> None:
    """Every collective between computations, in one graph without a break."""
    lengths = [3, 1][:ranks]

    def step(comm: Communicator, x: Tensor) -> Sequence[Tensor]:
        x = x * 2 + 1
        gathered = comm.redistribute(x, "s@ h -> s h", sizes={"s": lengths}).sin()
        q, k = comm.exchange([x, x + 1], "s@ h -> s h@", sizes={"s": lengths})
        part = comm.reduce_scatter_tensor(torch.zeros(2, 4), torch.ones(2 * ranks, 4) * x.sum(), "avg")
        total = comm.all_reduce(part.clone() * 2, "max")
        stacked = comm.all_gather_into_tensor(torch.zeros(ranks, 2, 4), part)
        turned = comm.all_to_all_single(torch.zeros(2 * ranks, 4), torch.ones(2 * ranks, 4) * x.mean())
        rows = comm.halo(total, 0, 1)
        return gathered * 3, q + 1, k, part, total, stacked, turned - 1, rows

    def work(comm: Communicator) -> None:
        x = torch.arange(4.0 * lengths[comm.rank]).view(-1, 4) + comm.rank
        eager = step(comm, x)
        graph = compiled(lambda y: step(comm, y))
        for _ in range(2):
            for out, wanted in zip(graph(x), eager, strict=True):
                assert same_bits(out, wanted)

    with world_of(ranks, timeout=60) as world:
        world.run(work)


def test_a_bad_call_is_named_while_it_is_compiled(one: LocalWorld) -> None:
    comm = one.communicators[0]
    with pytest.raises(Exception, match="`x` needs 2 dims"):  # torch wraps what a fake kernel raises
        compiled(lambda x: comm.redistribute(x, "a@ b -> a b"))(torch.ones(3))


def test_eager_calls_work_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compiler.is_compiling() is true of the whole process then; the operator and the call must not send each other round in circles."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    def work(comm: Communicator) -> None:
        assert comm.redistribute(torch.ones(2), "n@ -> n").sum() == 4
        assert torch.ops.purlin.exchange(*call(comm, "sum", torch.ones(2), CASES[0]))[0].sum() == 4
        assert comm.all_reduce(torch.ones(1)).item() == 2

    with world_of(2) as world:
        world.run(work)


def test_a_graph_that_outlived_its_communicator_says_so() -> None:
    def arguments(comm: Communicator) -> list[Any]:
        return call(comm, "sum", torch.ones(3), CASES[0])

    with world_of(1) as world:
        kept = arguments(world.communicators[0])
    with pytest.raises(ClosedError, match="the communicator is closed"):
        torch.ops.purlin.exchange(*kept)
    del world
    with pytest.raises(ClosedError, match="is gone; a compiled graph outlived it"):
        torch.ops.purlin.exchange(*kept)


def test_eager_calls_and_operators_are_one_kind_of_call() -> None:
    """A rank that compiles and one that does not understand each other."""

    def work(comm: Communicator) -> Tensor:
        x = torch.full((2,), float(comm.rank))
        if comm.rank:
            return comm.exchange([x], ["n@ -> n"])[0]
        return torch.ops.purlin.exchange(*call(comm, "sum", x, CASES[0]))[0]

    with world_of(2) as world:
        assert all(out.tolist() == [0.0, 0.0, 1.0, 1.0] for out in world.run(work))
