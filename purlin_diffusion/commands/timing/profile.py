"""One more call, watched: how much of a step goes to exchanges, and when.

On a GPU torch's profiler watches, and an exchange is its kernel, ours or NCCL's, by name; it sees, too, where the host waits for the GPU. On a CPU a
clock around each call of the carrier is enough, which has the time in it that is spent waiting for other ranks; only ours can be seen there. Each
step of a watched call ends when the GPU has done it, though no other call's does: so what runs between two ends is one step's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from purlin_diffusion.commands.picture import CLOCK, no_wait, wait_for
from purlin_diffusion.commands.timing.steps import around_steps

STEP, EXCHANGE = "purlin_diffusion: step", "purlin_diffusion: exchange"
KERNELS = re.compile(r"purlin::|nccl[A-Z]")
SYNCS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
MOST_SPANS = 400  # in one lane of a timeline
Span = tuple[float, float]  # milliseconds since the step began
Mark: TypeAlias = "Callable[[str], AbstractContextManager[Any]]"  # leaves an event of that name

HOST = {STEP, CLOCK, *SYNCS}


@dataclass(frozen=True)
class Profile:
    """Of one rank. `exchange_ms`: a step's mean; None where exchanges cannot be seen. Lanes are of one step amid the call.

    `syncs`: how often the host waits for a GPU between two calls of the scheduler, a mean; None on a CPU, and of a single step.
    """

    steps: int
    step_ms: float
    exchange_ms: float | None
    lanes: dict[str, tuple[Span, ...]]
    syncs: float | None = None

    @property
    def share(self) -> float | None:
        """Of a step, what goes to exchanges."""
        return None if self.exchange_ms is None or self.step_ms <= 0 else self.exchange_ms / self.step_ms


@dataclass(frozen=True)
class Event:
    """Milliseconds on one clock for all of a call."""

    name: str
    start: float
    end: float
    kernel: bool = False

    @property
    def exchange(self) -> bool:
        return bool(KERNELS.search(self.name)) if self.kernel else self.name == EXCHANGE


def profiled(draw: Callable[[], Any], pipe: Any, handle: Any, *, gpu: bool, exchanges: bool) -> tuple[Any, Profile]:
    """What draw() returned, and its profile. `exchanges`: whether there are any that can be seen."""
    drawn, events = (watched_gpu if gpu else watched_cpu)(draw, pipe, handle)
    return drawn, read(events, gpu=gpu, exchanges=exchanges)


def watched_cpu(draw: Callable[[], Any], pipe: Any, handle: Any) -> tuple[Any, list[Event]]:
    events: list[Event] = []

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        events.append(Event(name, start * 1e3, time.perf_counter() * 1e3))

    with marked_steps(pipe, mark, no_wait), marked_exchanges(handle, mark):
        return draw(), events


def watched_gpu(draw: Callable[[], Any], pipe: Any, handle: Any) -> tuple[Any, list[Event]]:
    from torch.profiler import ProfilerActivity, profile, record_function

    with (
        marked_steps(pipe, record_function, wait_for(pipe)),
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler,
    ):
        drawn = draw()
    return drawn, list(from_torch(profiler.events(), pipe.device.index or 0))


def from_torch(events: Sequence[Any], gpu: int) -> Iterator[Event]:
    """Steps, waits of the host, and the kernels of one GPU. torch's times are microseconds, and it shows ranges of the host a second time among the
    kernels."""
    for event in events:
        kernel = str(event.device_type).endswith("CUDA")
        if kernel and (event.device_index != gpu or getattr(event, "is_user_annotation", False)):
            continue
        if event.name == EXCHANGE or kernel == (event.name in HOST):
            continue
        yield Event(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3, kernel)


@contextmanager
def marked_steps(pipe: Any, mark: Mark, wait: Callable[[], None]) -> Iterator[None]:
    """Let each step of the scheduler leave an event, which ends when wait() has returned."""

    def marked(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mark(STEP):
            result = step(*args, **kwargs)
            wait()
        return result

    with around_steps(pipe, marked):
        yield


@contextmanager
def marked_exchanges(handle: Any, mark: Mark) -> Iterator[None]:
    """Let each exchange of this process's first rank leave an event."""
    shards = [session.sharded for session in handle.sessions] if handle else []
    carriers = [sharded.carrier for sharded in shards]
    for sharded, carrier in zip(shards, carriers, strict=True):
        sharded.reconnect(Marked(carrier, mark))
    try:
        yield
    finally:
        for sharded, carrier in zip(shards, carriers, strict=True):
            sharded.reconnect(carrier)


class Marked:
    """A carrier whose exchanges leave events; all else is the carrier's own."""

    def __init__(self, carrier: Any, mark: Mark) -> None:
        self._carrier, self._mark = carrier, mark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        with self._mark(EXCHANGE):
            return self._carrier.redistribute(*args, **kwargs)

    def exchange(self, *args: Any, **kwargs: Any) -> Any:
        with self._mark(EXCHANGE):
            return self._carrier.exchange(*args, **kwargs)


# ---- reading the events ----------------------------------------------------------------------------------------------
def read(events: Sequence[Event], *, gpu: bool, exchanges: bool) -> Profile:
    ends = sorted(event.end for event in events if event.name == STEP)
    moved = [(event.start, event.end) for event in events if event.exchange]
    begin, end = step_amid(ends, events)
    lanes = {"exchange": within(moved, begin, end)} if exchanges else {}
    if gpu:
        other = [(event.start, event.end) for event in events if event.kernel and not event.exchange]
        lanes["other kernels"] = within(other, begin, end)
    total = sum(stop - start for start, stop in union(moved)) / max(1, len(ends)) if exchanges else None
    return Profile(len(ends), end - begin, total, lanes, waits_a_step(events) if gpu else None)


def waits_a_step(events: Sequence[Event]) -> float | None:
    """Of the host, for a GPU, while a denoiser's call is launched; the clock's own are no part of it."""
    steps = sorted((event.start, event.end) for event in events if event.name == STEP and not event.kernel)
    clocks = [(event.start, event.end) for event in events if event.name == CLOCK]
    spans = [(end, start) for (_, end), (start, _) in pairwise(steps)]
    waits = [event.start for event in events if event.name in SYNCS and not inside(event.start, clocks)]
    return sum(inside(wait, spans) for wait in waits) / len(spans) if spans else None


def inside(moment: float, spans: Sequence[Span]) -> bool:
    return any(start <= moment <= end for start, end in spans)


def step_amid(ends: Sequence[float], events: Sequence[Event]) -> Span:
    """From the end of a step in the middle to that of the next; of a single step, the whole call."""
    if len(ends) > 1:
        middle = (len(ends) - 2) // 2
        return ends[middle], ends[middle + 1]
    return min((event.start for event in events), default=0.0), max((event.end for event in events), default=0.0)


def within(spans: Sequence[Span], begin: float, end: float) -> tuple[Span, ...]:
    """What of them lies in the step, neighbours joined until a plot can hold them."""
    inside = [
        (max(start, begin) - begin, min(stop, end) - begin) for start, stop in spans if start < end > begin < stop
    ]
    gap, joined = 0.0, union(inside)
    while len(joined) > MOST_SPANS:
        gap = gap * 2 or (end - begin) / 1e4
        joined = union(inside, gap)
    return tuple(joined)


def union(spans: Sequence[Span], gap: float = 0.0) -> list[Span]:
    """Spans that touch, or lie no further apart than `gap`, as one."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined
