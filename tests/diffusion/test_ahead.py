"""How far the host runs ahead of its GPUs: a call in a pipeline's loop, nothing elsewhere; what fails late is raised before the picture leaves.

GPUs here are counters: a call ends when somebody waits for it.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from purlin_diffusion.pipelines import flux
from torch import Tensor

from purlin_core import Communicator, LocalWorld, PeerError
from purlin_diffusion import Handle, ParallelConfig, ahead, parallelize
from purlin_diffusion.ahead import Ahead
from purlin_diffusion.graph.policy import Graphs
from purlin_diffusion.group_session import GroupSession
from purlin_diffusion.guidance import Manner
from purlin_diffusion.inputs import Carriers
from purlin_diffusion.registry import plan_of
from purlin_diffusion.route import Route
from tests.diffusion.echo import Studio

STEPS = 4
CPU = torch.device("cpu")


class Gpu:
    """Counts what was launched, and what has ended for want of it the host waited. `at_end`: what happens when a call ends."""

    def __init__(self) -> None:
        self.launched = self.ended = self.waits = 0
        self.recorded, self.stream = False, "the caller's"
        self.at_end: dict[int, Callable[[], None]] = {}

    @property
    def behind(self) -> int:
        return self.launched - self.ended

    def capturing(self) -> bool:
        return self.recorded

    def place(self) -> str:
        return self.stream

    def mark(self) -> End:
        assert not self.recorded
        self.launched += 1
        return End(self, self.launched)

    def come_to(self, call: int) -> None:
        assert not self.recorded
        self.waits += 1
        while self.ended < call:
            self.ended += 1
            self.at_end.pop(self.ended, lambda: None)()


class End:
    def __init__(self, gpu: Gpu, call: int) -> None:
        self._gpu, self._call = gpu, call

    def synchronize(self) -> None:
        self._gpu.come_to(self._call)


class Exchanges:
    """A carrier that has met `error`."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """One for each session that is opened."""
    made: list[Gpu] = []

    def line(devices: Any, ranks: int) -> Gpu:
        made.append(Gpu())
        return made[-1]

    monkeypatch.setattr(ahead, "line_of", line)
    return made


@pytest.fixture
def session(gpus: list[Gpu]) -> tuple[Ahead, Gpu, Any]:
    return Ahead([CPU], 2), gpus[0], Exchanges()


@pytest.fixture
def pipe() -> Any:
    made = flux.tiny(dtype=torch.float32, device=CPU)
    made.set_progress_bar_config(disable=True)
    return made


def draw(pipe: Any, at_step: Callable[[int], None] = lambda _: None, **changes: Any) -> Tensor:
    """Latents; at_step(i) is called when the host is through with step i."""

    def seen(_: Any, i: int, t: Any, kept: Any) -> dict[str, Any]:
        at_step(i)
        return {}

    call = {"height": 32, "width": 32, "num_inference_steps": STEPS, "max_sequence_length": 16, **changes}
    generator = torch.Generator().manual_seed(0)
    out: Tensor = pipe("an oak", generator=generator, output_type="latent", callback_on_step_end=seen, **call).images
    return out


# ---- the concept -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("where", "behind"), [(nullcontext, 0), (None, 1)])
def test_the_host_is_one_call_ahead_in_a_loop_and_none_elsewhere(
    session: tuple[Ahead, Gpu, Any], where: Callable[[], AbstractContextManager[None]] | None, behind: int
) -> None:
    calls, gpu, exchanges = session
    with (where or calls.loop)():
        for _ in range(STEPS):
            calls.launched(exchanges)
            assert gpu.behind == behind
    calls.settled(exchanges)
    calls.settled(exchanges)
    assert (gpu.ended, gpu.waits) == (STEPS, STEPS)  # a call is waited for once


def test_a_loop_is_a_threads_own_and_may_lie_in_another(session: tuple[Ahead, Gpu, Any]) -> None:
    from purlin_diffusion.workers import Worker

    calls, gpu, exchanges = session
    worker = Worker("purlin-test")
    with calls.loop():
        with calls.loop():
            pass
        calls.launched(exchanges)
        assert gpu.behind == 1
        worker.run(lambda: calls.launched(exchanges)).result(5)
        assert gpu.behind == 0
    worker.close()


@pytest.mark.parametrize("hear", ["launched", "settled"])
def test_what_a_call_met_is_raised_once(session: tuple[Ahead, Gpu, Any], hear: str) -> None:
    calls, gpu, exchanges = session
    gpu.at_end[1] = lambda: setattr(exchanges, "error", PeerError("it felt like it"))
    with calls.loop():
        calls.launched(exchanges)
        with pytest.raises(PeerError, match="felt like it"):
            getattr(calls, hear)(exchanges)
    calls.forget()
    calls.settled(exchanges)
    assert gpu.behind == 0


def test_nothing_is_touched_while_it_is_recorded(session: tuple[Ahead, Gpu, Any]) -> None:
    calls, gpu, exchanges = session
    with calls.loop():
        calls.launched(exchanges)
        gpu.recorded, gpu.stream = True, "the recording's"  # and it asserts that nobody waits or marks
        calls.launched(exchanges)
        calls.settled(exchanges)
        calls.forget()
        assert not calls.moved()
    gpu.recorded = False
    assert gpu.behind == 1 and calls.moved()
    calls.settled(exchanges)
    assert gpu.behind == 0 and not calls.moved()


def test_a_context_that_is_broken_keeps_nobody_from_closing(session: tuple[Ahead, Gpu, Any]) -> None:
    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    calls, gpu, exchanges = session
    gpu.at_end[1] = broken
    with calls.loop():
        calls.launched(exchanges)
    calls.forget()


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 2), ("cpu", 1), ("cuda:0", 1)])
def test_with_one_rank_and_on_the_cpu_there_is_nothing_to_wait_for(device: str, ranks: int) -> None:
    calls: Any = Ahead([torch.device(device)] * ranks, ranks)
    with calls.loop():
        calls.launched(None)
    calls.settled(None)
    assert not calls.waits and not calls.moved()


# ---- pictures --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("graph", [False, True])
def test_steps_of_a_pipeline_run_one_ahead_and_its_picture_leaves_settled(
    pipe: Any, gpus: list[Gpu], graph: bool
) -> None:
    behind: list[int] = []
    recorded: list[int] = []
    one = draw(pipe)
    studio = Studio(fails=lambda device: recorded.append(gpus[0].behind))
    handle = studio.open(pipe, ParallelConfig(graph=graph), devices=2)
    for _ in range(2):
        assert (draw(pipe, lambda i: behind.append(gpus[0].behind)) - one).abs().max() <= 1e-5
        assert gpus[0].behind == 0
    assert behind == [1] * 2 * STEPS
    assert recorded == [0] * graph
    handle.undo()


def test_calls_of_the_model_alone_are_heard_before_they_return(pipe: Any, gpus: list[Gpu]) -> None:
    behind: list[int] = []
    handle = parallelize(pipe.transformer, devices=2)
    draw(pipe, lambda i: behind.append(gpus[0].behind))
    assert behind == [0] * STEPS and handle.loop is None
    handle.undo()


def test_a_bar_in_the_place_of_ours_has_each_call_heard(pipe: Any, gpus: list[Gpu]) -> None:
    behind: list[int] = []
    handle = parallelize(pipe, devices=2)
    pipe.progress_bar = type(pipe).progress_bar.__get__(pipe)
    draw(pipe, lambda i: behind.append(gpus[0].behind))
    assert behind == [0] * STEPS
    handle.undo()
    assert "progress_bar" in vars(pipe)  # it is not ours


def test_another_stream_waits_for_the_call_before(pipe: Any, gpus: list[Gpu]) -> None:
    behind: list[int] = []

    def move(i: int) -> None:
        gpus[0].stream = f"another, {i}"

    handle = parallelize(pipe, devices=2)
    pipe.transformer.transformer_blocks[0].register_forward_hook(lambda *_: behind.append(gpus[0].behind))
    draw(pipe, move)
    assert set(behind) == {0}
    handle.undo()


def test_a_changed_model_waits_for_the_call_before(pipe: Any, gpus: list[Gpu]) -> None:
    """Whose replicas go."""
    behind: list[int] = []

    def change(i: int) -> None:
        pipe.transformer.set_attn_processor(type(next(iter(pipe.transformer.attn_processors.values())))())

    handle = parallelize(pipe, devices=2)
    pipe.transformer.transformer_blocks[0].register_forward_hook(lambda *_: behind.append(gpus[0].behind))
    draw(pipe, change)
    assert set(behind) == {0}
    handle.undo()


def test_latents_in_a_callback_may_be_waited_for(pipe: Any, gpus: list[Gpu]) -> None:
    behind: list[int] = []

    def look(i: int) -> None:
        handle.check()
        behind.append(gpus[0].behind)

    handle = parallelize(pipe, devices=2)
    draw(pipe, look)
    assert behind == [0] * STEPS
    handle.undo()


def test_a_failure_that_another_thread_hears_first_is_raised_in_the_loop_too(pipe: Any, gpus: list[Gpu]) -> None:
    handle = parallelize(pipe, ParallelConfig(timeout=20), devices=2)
    gpus[0].at_end[2] = lambda: handle.sessions[0].carriers[0].abort("it felt like it")
    heard: list[BaseException] = []

    def listen() -> None:
        try:
            handle.check()
        except PeerError as error:
            heard.append(error)

    def at_step(step: int) -> None:
        if step == 1:
            listener = threading.Thread(target=listen)
            listener.start()
            listener.join()

    with pytest.raises(PeerError, match="it felt like it"):
        draw(pipe, at_step)
    assert len(heard) == 1
    handle.undo()


# ---- what fails late -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", [1, 2, STEPS])
@pytest.mark.parametrize("graph", [False, True])
def test_a_failure_is_raised_before_the_picture_leaves_and_the_next_one_is_right(
    pipe: Any, gpus: list[Gpu], call: int, graph: bool
) -> None:
    """By the call after it, or where the loop ends."""
    through: list[int] = []
    one = draw(pipe)
    handle = Studio().open(pipe, ParallelConfig(graph=graph, timeout=20), devices=2)
    gpus[0].at_end[call] = lambda: handle.sessions[0].carriers[0].abort("it felt like it")
    with pytest.raises(PeerError, match="felt like it"):
        draw(pipe, through.append)
    assert len(through) == call and gpus[0].behind == 0
    assert (draw(pipe) - one).abs().max() <= 1e-5
    handle.undo()
    assert torch.equal(draw(pipe), one)


@pytest.mark.parametrize("graph", [False, True])
def test_check_raises_and_the_next_call_works(pipe: Any, gpus: list[Gpu], graph: bool) -> None:
    def look(i: int) -> None:
        if i == 2:
            handle.check()

    handle = Studio().open(pipe, ParallelConfig(graph=graph, timeout=20), devices=2)
    gpus[0].at_end[3] = lambda: handle.sessions[0].carriers[1].abort("it felt like it")
    with pytest.raises(PeerError, match="felt like it"):
        draw(pipe, look)
    assert draw(pipe).isfinite().all()
    handle.undo()


@pytest.mark.parametrize("late", [False, True])
def test_an_exception_in_the_loop_is_told_as_it_is_and_undo_tells_what_was_not_heard(
    pipe: Any, gpus: list[Gpu], late: bool
) -> None:
    """When all is as before."""

    def stop(i: int) -> None:
        raise KeyError("enough")

    one = draw(pipe)
    handle = parallelize(pipe, ParallelConfig(timeout=20), devices=2)
    if late:
        gpus[0].at_end[1] = lambda: handle.sessions[0].carriers[0].abort("it felt like it")
    with pytest.raises(KeyError, match="enough"):
        draw(pipe, stop)
    assert gpus[0].behind == 1
    with pytest.raises(PeerError, match="felt like it") if late else nullcontext():
        handle.undo()
    assert gpus[0].behind == 0 and "progress_bar" not in vars(pipe)
    handle.undo()
    assert torch.equal(draw(pipe), one)


def test_what_a_rank_raises_ends_all_that_was_launched(pipe: Any, gpus: list[Gpu]) -> None:
    def arm(i: int) -> None:
        pipe.transformer.norm_out.register_forward_hook(fail)

    def fail(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            raise ValueError("out of glue")

    handle = parallelize(pipe, ParallelConfig(timeout=20), devices=2)
    with pytest.raises(ValueError, match="out of glue"):
        draw(pipe, arm)
    assert gpus[0].behind == 0
    handle.undo()


# ---- ranks that hold their model each --------------------------------------------------------------------------------
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


# ---- the door --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("own", [False, True])
def test_undo_gives_the_bar_back(pipe: Any, gpus: list[Gpu], own: bool) -> None:
    if own:
        pipe.progress_bar = type(pipe).progress_bar.__get__(pipe)
    before = dict(vars(pipe))
    handle = parallelize(pipe, devices=2)
    assert vars(pipe)["progress_bar"] is handle.loop
    handle.undo()
    assert vars(pipe) == before


def test_a_bar_is_used_as_ever(pipe: Any, gpus: list[Gpu]) -> None:
    handle = parallelize(pipe, devices=2)
    assert list(pipe.progress_bar([3, 1])) == [3, 1]
    bar = pipe.progress_bar(total=2)
    bar.update()
    with bar as same:
        assert same.total == bar.total == 2
    with pytest.raises(ValueError, match="has to be defined"):
        pipe.progress_bar()
    handle.undo()


def test_a_copy_of_the_pipeline_has_a_bar_of_its_own(pipe: Any, gpus: list[Gpu]) -> None:
    handle: Handle = parallelize(pipe, devices=2)
    twin = object.__new__(type(pipe))
    assert handle.loop is not None
    assert copy.deepcopy(handle.loop, {id(pipe): twin}).__self__ is twin
    handle.undo()


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_gpu_the_bar_is_let_alone(pipe: Any, ranks: int) -> None:
    before = dict(vars(pipe))
    handle = parallelize(pipe, devices=ranks)
    assert vars(pipe) == before and handle.loop is None
    handle.undo()
