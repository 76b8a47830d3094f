"""Ranks that hold a model each run one ahead, too."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Barrier, Event
from typing import Any

import pytest
from torch import Tensor

from purlin_core import Communicator, LocalWorld, PeerError
from purlin_diffusion import ParallelConfig
from purlin_diffusion.graph.policy import Graphs
from purlin_diffusion.group_session import GroupSession
from purlin_diffusion.guidance import Manner
from purlin_diffusion.inputs import Carriers
from purlin_diffusion.registry import plan_of
from purlin_diffusion.route import Route
from tests.diffusion.ahead.counters import CPU, STEPS, Gpu
from tests.diffusion.echo import Studio


@contextmanager
def groups(
    case: Any, graphs: Graphs | None = None
) -> Iterator[Callable[[Callable[[GroupSession, Gpu, Callable[[], Tensor]], Any]], list[Any]]]:
    """on_ranks(fn): fn(session, gpu, run) of two ranks, whose packets go by another carrier than their exchanges, as on GPUs."""
    models = [case.model, copy.deepcopy(case.model)]
    graphs = graphs or Graphs(ParallelConfig(graph=False))
    with LocalWorld(2, timeout=20) as world, LocalWorld(2, timeout=20) as hosts:

        def on_ranks(fn: Callable[[GroupSession, Gpu, Callable[[], Tensor]], Any]) -> list[Any]:
            def rank_of(comm: Communicator) -> Any:
                model, carriers = models[comm.rank], Carriers(device=comm, host=hosts.communicators[comm.rank])
                route = Route("purlin", "a test's")
                session = GroupSession(
                    model, plan_of(model), Manner("gather_kv"), carriers, route, device=CPU, owned=False, graphs=graphs
                )
                try:
                    gpu: Any = session.ahead._line
                    return fn(session, gpu, lambda: case.run(model))
                finally:
                    session.close()

            return world.run(rank_of)

        yield on_ranks


def test_ranks_with_a_model_each_run_one_ahead(tiny: Callable[..., Any], gpus: list[Gpu]) -> None:
    def rank_of(session: GroupSession, gpu: Gpu, run: Callable[[], Tensor]) -> list[int]:
        behind = []
        with session.ahead.loop():
            for _ in range(STEPS):
                run()
                behind.append(gpu.behind)
        session.check()
        run()
        return [*behind, gpu.behind]

    with groups(tiny("flux")) as on_ranks:
        assert on_ranks(rank_of) == [[1] * STEPS + [0]] * 2


def test_ranks_with_a_model_each_wait_before_another_stream_and_before_they_close(
    tiny: Callable[..., Any], gpus: list[Gpu]
) -> None:
    def rank_of(session: GroupSession, gpu: Gpu, run: Callable[[], Tensor]) -> list[int]:
        behind: list[int] = []
        session.sharded.model.norm_out.register_forward_hook(lambda *_: behind.append(gpu.behind))
        with session.ahead.loop():
            for step in range(STEPS):
                gpu.stream = f"stream {step // 2}"
                run()
        session.close()
        return [*behind, gpu.behind]

    with groups(tiny("flux")) as on_ranks:
        assert on_ranks(rank_of) == [[0, 1, 0, 1, 0]] * 2


def test_ranks_with_a_model_each_wait_before_they_record(tiny: Callable[..., Any], gpus: list[Gpu]) -> None:
    recorded: list[int] = []
    own: dict[int, Gpu] = {}  # by thread
    studio = Studio(fails=lambda device: recorded.append(own[threading.get_ident()].behind))

    def rank_of(session: GroupSession, gpu: Gpu, run: Callable[[], Tensor]) -> list[int]:
        own[threading.get_ident()], behind = gpu, []
        with session.ahead.loop():
            for _ in range(STEPS):
                run()
                behind.append(gpu.behind)
        return behind

    with groups(tiny("flux"), studio.graphs(ParallelConfig(graph=True))) as on_ranks:
        assert on_ranks(rank_of) == [[1] * STEPS] * 2
    assert recorded == [0, 0]


@pytest.mark.parametrize("hear", ["the next call", "check()"])
def test_a_rank_with_a_model_of_its_own_hears_late(tiny: Callable[..., Any], gpus: list[Gpu], hear: str) -> None:
    together = Barrier(2)

    def rank_of(session: GroupSession, gpu: Gpu, run: Callable[[], Tensor]) -> int:
        gpu.at_end[1] = lambda: session.carriers[0].abort("it felt like it")
        with session.ahead.loop():
            run()
            together.wait(20)
            with pytest.raises(PeerError, match="felt like it"):
                run() if hear == "the next call" else session.check()
        return gpu.behind

    with groups(tiny("flux")) as on_ranks:
        assert on_ranks(rank_of) == [0, 0]


def test_a_rank_that_is_ahead_hears_in_its_next_call_that_another_has_left(
    tiny: Callable[..., Any], gpus: list[Gpu]
) -> None:
    """At once, and why: the other fails when this one is through with the call, and never comes to the next."""
    through = Event()

    def rank_of(session: GroupSession, gpu: Gpu, run: Callable[[], Tensor]) -> float:
        def fail(*_: Any) -> None:
            assert through.wait(20)
            raise ValueError("out of glue")

        with session.ahead.loop():
            if session.rank == 1:
                session.sharded.model.proj_out.register_forward_hook(fail)
                with pytest.raises(ValueError, match="out of glue"):
                    run()
                return 0.0
            run()
            through.set()
            began = time.monotonic()
            with pytest.raises(PeerError, match="rank 1 left: ValueError: out of glue"):
                run()
        session.check()  # it is told
        assert gpu.behind == 0
        return time.monotonic() - began

    with groups(tiny("flux")) as on_ranks:
        assert max(on_ranks(rank_of)) < 5
