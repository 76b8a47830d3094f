"""CUDA graphs: captured calls advance the protocol's counts at every replay, among eager calls, and nothing is planned during a capture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator, DeviceError, LocalWorld
from tests.core.worlds import REGIMES, errors_of
from tests.gpu.devices import DEVICE, captured, gpu_world, settled

pytestmark = pytest.mark.gpu

SIZE = 700


def gathered(comm: Communicator, x: Tensor, out: Tensor) -> Tensor:
    return comm.redistribute(x, "n@ -> n", out=out)


def outputs(world: LocalWorld, regime: str) -> list[Tensor]:
    size = SIZE * world.ranks

    def make(comm: Communicator) -> Tensor:
        return comm.empty((size,)) if regime == "direct" else torch.zeros(size, device=comm.device)

    return world.run(make)


def inputs(ranks: int) -> list[Tensor]:
    return [torch.zeros(SIZE, device=DEVICE) for _ in range(ranks)]


def fill(xs: list[Tensor], turn: int) -> Tensor:
    """New values in place; returns what every rank must gather."""
    for rank, x in enumerate(xs):
        x.copy_(torch.arange(SIZE, device=x.device) + 1000.0 * turn + 100_000.0 * rank)
    return torch.cat(xs)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("regime", REGIMES)
def test_replays_and_eager_calls_take_turns(ranks: int, regime: str) -> None:
    """More replays than slots, windows and grants; new inputs each time; an eager call of another kind between."""
    random = Random(ranks)
    with gpu_world(ranks, "fused", regime, teams=2, slot_bytes=256) as world:
        xs, outs = inputs(ranks), outputs(world, regime)
        world.run(lambda comm: gathered(comm, xs[comm.rank], outs[comm.rank]))
        graph, _ = captured(world, lambda comm: gathered(comm, xs[comm.rank], outs[comm.rank]))
        for turn in range(60):
            wanted = fill(xs, turn)
            for out in outs:
                out.zero_()
            if random.random() < 0.6:
                graph.replay()
            else:
                world.run(lambda comm: gathered(comm, xs[comm.rank], outs[comm.rank]))
            assert all(torch.equal(out, wanted) for out in outs), turn
            if random.random() < 0.3:
                sums = world.run(lambda comm: comm.all_reduce(torch.ones(9, device=comm.device)))
                assert all((x == ranks).all() for x in sums)
        settled(world)


@pytest.mark.parametrize("regime", REGIMES)
def test_a_graph_of_many_calls_makes_its_own_outputs(regime: str) -> None:
    """Outputs come from the graph's pool; a chain of calls reads what the one before has written."""
    with gpu_world(2, "fused", regime, slot_bytes=256) as world:
        xs = inputs(2)

        def chain(comm: Communicator) -> Tensor:
            x = xs[comm.rank]
            for _ in range(5):
                whole = comm.redistribute(x, "n@ -> n")
                total = comm.redistribute(whole + comm.rank, "+n -> n")
                x = comm.redistribute(total, "n -> n@").clone() + 1
            return x

        eager = world.run(chain)
        graph, outs = captured(world, chain)
        for turn in range(5):
            fill(xs, turn)
            graph.replay()
            found = [out.clone() for out in outs]
            assert all(map(torch.equal, world.run(chain), found)), turn
        assert eager[0].shape == outs[0].shape
        settled(world)


def test_strided_and_uneven_calls_can_be_captured() -> None:
    """Their boxes lie in device memory: made by the first call, or by plan()."""
    lengths = [5, 3]
    xs = [torch.randn(1, n, 6, 8, device=DEVICE) for n in lengths]

    def heads(comm: Communicator) -> Tensor:
        return comm.exchange([xs[comm.rank]], "b s@ h d -> b s h@ d", sizes={"s": lengths})[0]

    with gpu_world(2) as world:
        world.run(lambda comm: comm.plan([xs[comm.rank]], "b s@ h d -> b s h@ d", sizes={"s": lengths}))
        graph, outs = captured(world, heads)
        for _ in range(7):
            for x in xs:
                x.normal_()
            graph.replay()
            whole = torch.cat(xs, 1)
            assert torch.equal(outs[0], whole[:, :, :3]) and torch.equal(outs[1], whole[:, :, 3:])
        settled(world)


def test_a_call_that_was_never_made_is_refused_in_a_capture_and_the_world_lives() -> None:
    with gpu_world(2) as world:
        x = torch.ones(3, device=DEVICE)
        world.run(lambda comm: comm.all_reduce(x.clone()))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            errors = errors_of(world, lambda comm: comm.redistribute(x, "n@ -> n"))
            y = x + 1
        assert all(type(error) is DeviceError and "plan()" in str(error) for error in errors), errors
        graph.replay()
        assert (y == 2).all()
        assert all(out.sum() == 6 for out in world.run(lambda comm: comm.redistribute(x, "n@ -> n")))
        settled(world)


@pytest.mark.parametrize("regime", REGIMES)
def test_ranks_on_streams_replay_graphs_of_their_own(regime: str) -> None:
    """Each rank captures its calls and replays them on its stream, among eager calls."""
    with gpu_world(2, "streams", regime, slot_bytes=256) as world:
        xs, outs = inputs(2), outputs(world, regime)
        one_at_a_time = threading.Lock()
        everyone = threading.Barrier(2)

        def eager(comm: Communicator) -> Tensor:
            return gathered(comm, xs[comm.rank], outs[comm.rank])

        def capture(comm: Communicator) -> torch.cuda.CUDAGraph:
            graph, own = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            own.synchronize()
            everyone.wait()
            with one_at_a_time, torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"):
                eager(comm)
                eager(comm)
            return graph

        world.run(eager)
        graphs = world.run(capture)
        turns: tuple[Callable[[Communicator], object], ...] = (lambda comm: graphs[comm.rank].replay(), eager)
        for turn in range(40):
            wanted = fill(xs, turn)
            world.run(turns[turn % 3 == 2])
            assert all(torch.equal(out, wanted) for out in outs), turn
        settled(world)


def test_replays_of_a_dead_communicator_end_at_once() -> None:
    with gpu_world(2, timeout=60.0) as world:
        xs, outs = inputs(2), outputs(world, "staged")
        world.run(lambda comm: gathered(comm, xs[comm.rank], outs[comm.rank]))
        graph, _ = captured(world, lambda comm: gathered(comm, xs[comm.rank], outs[comm.rank]))
        graph.replay()
        settled(world)
        world.communicators[1].abort("the user pressed stop")
        before = [out.clone() for out in outs]
        fill(xs, 1)
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()  # twenty deadlines of 60 s would end the test
        assert all(map(torch.equal, outs, before))
        for error in errors_of(world, Communicator.check):
            assert "rank 1 left: the user pressed stop" in str(error)
