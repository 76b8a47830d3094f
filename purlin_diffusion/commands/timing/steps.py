"""A pipeline's steps, looked at from outside: between two calls of its scheduler lies one of its denoiser, or two with guidance."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@contextmanager
def around_steps(
    pipe: Any, call: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """call(step, args, kwargs) in the place of the scheduler's step."""
    scheduler, before = pipe.scheduler, pipe.scheduler.__dict__.get("step")
    step = scheduler.step

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return call(step, args, kwargs)

    scheduler.step = watched
    try:
        yield
    finally:
        if before is None:
            del scheduler.step
        else:
            scheduler.step = before


@dataclass
class Outputs:
    """Of one picture, where it was drawn: the latents that the first step began with, what the denoiser said of them, and the latents at the end."""

    start: Any = None
    first: Any = None
    last: Any = None


@contextmanager
def seen_outputs(pipe: Any) -> Iterator[Outputs]:
    """Those of the picture drawn inside."""
    seen = Outputs()

    def look(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if seen.first is None:
            seen.first = kwargs["model_output"] if "model_output" in kwargs else args[0]
            seen.start = kwargs["sample"] if "sample" in kwargs else args[2]
        result = step(*args, **kwargs)
        seen.last = result[0]
        return result

    with around_steps(pipe, look):
        yield seen
