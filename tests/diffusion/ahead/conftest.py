"""Sessions whose GPUs are counters, and a pipeline to draw with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from purlin_diffusion.pipelines import flux

from purlin_diffusion import ahead
from purlin_diffusion.ahead import Ahead
from tests.diffusion.ahead.counters import CPU, Exchanges, Gpu


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
