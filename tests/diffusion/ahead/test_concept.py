"""How far the host runs ahead of its GPUs: a call in a loop, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from purlin_core import PeerError
from purlin_diffusion.ahead import Ahead
from tests.diffusion.ahead.counters import STEPS, Gpu


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
