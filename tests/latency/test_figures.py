"""What is read of clocks, profiles and images, and how repeats and ranks become a row."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from purlin_diffusion.commands.picture import CLOCK
from purlin_diffusion.commands.timing import (
    memory,
    profile,
    rank,
    watch,
)
from purlin_diffusion.commands.timing.likeness import Likeness
from purlin_diffusion.commands.timing.profile import EXCHANGE, STEP, Event
from purlin_diffusion.commands.timing.visit import DEFECT
from tests.latency.runs import (
    of_two_ranks,
)

# ---- figures


def test_a_time_is_that_of_the_slowest_rank_and_the_rival_is_the_best_of_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = of_two_ranks(monkeypatch)
    assert [row.whole_s.median for row in result.measured if row.whole_s] == [4.0, 3.0, 6.0, 1.5]
    assert [row.step_s.median if row.step_s else None for row in result.rows] == [2.0, 1.0, None, 0.75]
    assert [row.speedup for row in result.rows] == [0.75, 1.0, 0.5, 2.0]
    assert [row.images_per_s for row in result.rows] == [1 / 4, 1 / 3, 2 / 6, 1 / 1.5]
    assert result.rows[-1].memory_gb == 1.5
    assert result.rows[-1].likeness == Likeness(0.5, 6.0)


def test_likeness_is_the_largest_difference_and_the_noise() -> None:
    black, grey = np.zeros((4, 4, 3), np.float32), np.full((4, 4, 3), 0.1, np.float32)
    assert Likeness.of(black, black) == Likeness(0.0, None)
    apart = Likeness.of(grey, black)
    assert apart.max_abs == pytest.approx(0.1)
    assert apart.psnr_db == pytest.approx(20.0, abs=1e-4)


def test_exchanges_are_counted_once_and_a_step_lies_between_two_ends() -> None:
    steps = [Event(STEP, end - 1, end) for end in (10.0, 20.0, 30.0)]
    moved = [Event(EXCHANGE, 8.0, 12.0), Event(EXCHANGE, 11.0, 14.0), Event(EXCHANGE, 29.0, 31.0), Event("x", 0, 40)]
    seen = profile.read([*steps, *moved], gpu=False, exchanges=True)
    assert (seen.steps, seen.step_ms, seen.exchange_ms) == (3, 10.0, pytest.approx((6.0 + 2.0) / 3))
    assert seen.lanes == {"exchange": ((0.0, 4.0),)}
    assert profile.read(steps, gpu=False, exchanges=False).exchange_ms is None


def test_kernels_are_exchanges_by_their_names() -> None:
    names = ("void purlin::gpu::direct_kernel<2>", "ncclDevKernel_AllGather", "sm90_gemm")
    events = [Event(name, i, i + 1.0, kernel=True) for i, name in enumerate(names)]
    seen = profile.read([Event(STEP, -1.0, 0.0), Event(STEP, 3.0, 4.0), *events], gpu=True, exchanges=True)
    assert seen.lanes == {"exchange": ((0.0, 2.0),), "other kernels": ((2.0, 3.0),)}
    assert seen.exchange_ms == 1.0


def test_of_torch_s_events_the_steps_and_one_gpu_s_kernels_are_read() -> None:
    def event(name: str, device: str, index: int = 0) -> Any:
        span = SimpleNamespace(start=1000.0, end=2000.0)
        return SimpleNamespace(name=name, device_type=f"DeviceType.{device}", device_index=index, time_range=span)

    events = [event(name, device) for name in (STEP, EXCHANGE, "gemm") for device in ("CPU", "CUDA")]
    found = list(profile.from_torch([*events, event("gemm", "CUDA", index=1)], 0))
    assert found == [Event(STEP, 1.0, 2.0), Event("gemm", 1.0, 2.0, kernel=True)]


def test_waits_of_the_host_are_counted_but_for_the_clock_s_own() -> None:
    steps = [Event(STEP, start, start + 1.0) for start in (0.0, 10.0, 20.0)]
    waits = [Event("cudaStreamSynchronize", at, at + 0.1) for at in (3.0, 4.0, 12.0, 0.5, 25.0)]
    clock = [Event(CLOCK, 1.1, 1.9), Event("cudaDeviceSynchronize", 1.2, 1.8)]
    assert profile.waits_a_step([*steps, *waits, *clock]) == 3 / 2
    assert profile.waits_a_step(steps[:1]) is None


def test_ranges_of_the_host_are_no_kernels() -> None:
    def event(name: str, device: str, *, annotation: bool = False) -> Any:
        span = SimpleNamespace(start=0.0, end=1.0)
        kind = f"DeviceType.{device}"
        return SimpleNamespace(
            name=name, device_type=kind, device_index=0, time_range=span, is_user_annotation=annotation
        )

    given = [
        event("purlin attention at x", "CUDA", annotation=True),
        event("nccl:all_gather", "CUDA", annotation=True),
        event("cudaStreamSynchronize", "CPU"),
        event("aten::mm", "CPU"),
        event("purlin root call of X", "CUDA"),
    ]
    found = list(profile.from_torch(given, 0))
    assert [each.name for each in found] == ["cudaStreamSynchronize", "purlin root call of X"]
    assert not any(each.exchange for each in found)


def test_the_host_s_clock_leaves_its_waits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives torch its functions back."""
    import torch

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: time.sleep(0.05))
    places = (torch.cuda, torch.cuda.Stream, torch.cuda.Event)
    before = [place.synchronize for place in places]
    with watch.waits() as waited:
        torch.cuda.synchronize()
        mine = waited()
        assert mine >= 0.05
        other = threading.Thread(target=torch.cuda.synchronize)
        other.start()
        other.join()
        assert waited() == mine
        assert [place.synchronize for place in places] != before
    assert [place.synchronize for place in places] == before


def test_memory_of_other_modes_is_not_this_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    model = torch.nn.Linear(8, 8)
    assert memory.held([model, model], "cpu") == (64 + 8) * 4
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 7_000_000_000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 9_000_000_000)
    monkeypatch.setattr(memory, "held", lambda *_: 3_000_000_000)
    others = memory.start(["cuda:0", "cuda:0"], [model])
    assert others == {"cuda:0": 4_000_000_000}
    assert memory.peak_gb(["cuda:0", "cuda:0"], others) == 5.0


def test_a_plot_holds_the_busiest_step() -> None:
    spans = [(i / 10, i / 10 + 0.05) for i in range(20_000)]
    joined = profile.within(spans, 0.0, 2000.0)
    assert 0 < len(joined) <= profile.MOST_SPANS
    assert (joined[0][0], joined[-1][1]) == (0.0, pytest.approx(1999.95))


def test_a_defect_outweighs_what_the_other_ranks_say_of_it() -> None:
    left, defect = "rank 1 left: ValueError: ill", f"{DEFECT}: ValueError: ill"
    assert rank.weightiest([left, "", defect]) == rank.weightiest([defect, left]) == defect
    assert rank.weightiest(["", left]) == left and rank.weightiest(["", ""]) == ""
