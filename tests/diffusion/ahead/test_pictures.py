"""Steps of a pipeline run one ahead, calls of a model alone do not, and a picture leaves settled."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from purlin_core import PeerError
from purlin_diffusion import ParallelConfig, parallelize
from tests.diffusion.ahead.counters import STEPS, Gpu, draw
from tests.diffusion.echo import Studio


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
