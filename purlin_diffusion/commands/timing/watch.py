"""What a step costs the host: until all of it is launched, and what it allocates. One call more, without a profiler, which would slow the host. Each
step begins with an idle GPU: a host that has run ahead would stand before a full queue, and that is no cost of launching."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from purlin_diffusion.commands.picture import wait_for
from purlin_diffusion.commands.timing.steps import around_steps

WAIT = "synchronize"  # of torch.cuda, its streams and its events


@dataclass(frozen=True)
class Host:
    """Medians over the steps after the first, of what lies between two calls of the scheduler: the denoiser, and a little of the pipeline.

    `ms`: without the time in which the host only waits for the GPU. `allocations`: blocks that torch's allocator gave out on the first rank's GPU;
    `mallocs`: those for which it had to ask CUDA.
    """

    ms: float
    allocations: float
    mallocs: float


@dataclass(frozen=True)
class _Moment:
    seconds: float
    waited: float
    allocations: int
    mallocs: int


def watched_host(draw: Callable[[], Any], pipe: Any, *, gpu: bool) -> tuple[Any, Host | None]:
    """What draw() returned, and what its steps cost; None with a single step, and on a CPU, where the host does it all."""
    if not gpu:
        return draw(), None
    begun: list[_Moment] = []
    ended: list[_Moment] = []
    wait = wait_for(pipe)
    with waits() as waited:

        def look(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            begun.append(_here(pipe.device, waited, last=False))
            result = step(*args, **kwargs)
            wait()
            ended.append(_here(pipe.device, waited, last=True))
            return result

        with around_steps(pipe, look):
            drawn = draw()
    spans = list(zip(ended[:-1], begun[1:], strict=True))
    if not spans:
        return drawn, None
    median = statistics.median
    return drawn, Host(
        1e3 * median((end.seconds - start.seconds) - (end.waited - start.waited) for start, end in spans),
        median(end.allocations - start.allocations for start, end in spans),
        median(end.mallocs - start.mallocs for start, end in spans),
    )


def _here(device: Any, waited: Callable[[], float], *, last: bool) -> _Moment:
    """`last`: the clock is read last, else first, so that reading the rest is in no step's time."""
    import torch

    first = time.perf_counter()
    stats = torch.cuda.memory_stats(device)
    counts = int(stats.get("allocation.all.allocated", 0)), int(stats.get("num_device_alloc", 0))
    return _Moment(time.perf_counter() if last else first, waited(), *counts)


@contextmanager
def waits() -> Iterator[Callable[[], float]]:
    """A clock of the seconds that this thread has waited for GPUs, inside."""
    import torch

    mine, total = threading.get_ident(), [0.0]

    def timed(wait: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                if threading.get_ident() == mine:
                    total[0] += time.perf_counter() - began

        return waiting

    with ExitStack() as stack:
        for place in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            own = WAIT in vars(place)
            before = getattr(place, WAIT)
            setattr(place, WAIT, timed(before))
            stack.callback(setattr, place, WAIT, before) if own else stack.callback(delattr, place, WAIT)
        yield lambda: total[0]
