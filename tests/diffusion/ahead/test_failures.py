"""What fails late is raised before the picture leaves."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from purlin_core import PeerError
from purlin_diffusion import ParallelConfig, parallelize
from tests.diffusion.ahead.counters import STEPS, Gpu, draw
from tests.diffusion.echo import Studio


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
