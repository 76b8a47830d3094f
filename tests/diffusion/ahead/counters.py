"""GPUs that are counters: a call ends when somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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


def draw(pipe: Any, at_step: Callable[[int], None] = lambda _: None, **changes: Any) -> Tensor:
    """Latents; at_step(i) is called when the host is through with step i."""

    def seen(_: Any, i: int, t: Any, kept: Any) -> dict[str, Any]:
        at_step(i)
        return {}

    call = {"height": 32, "width": 32, "num_inference_steps": STEPS, "max_sequence_length": 16, **changes}
    generator = torch.Generator().manual_seed(0)
    out: Tensor = pipe("an oak", generator=generator, output_type="latent", callback_on_step_end=seen, **call).images
    return out
