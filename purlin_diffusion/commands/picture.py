"""A pipeline, loaded and called as the options say, with its clock."""

from __future__ import annotations

import inspect
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from purlin_diffusion.commands.exits import InputError
from purlin_diffusion.commands.options import Options

Mark: TypeAlias = Any  # a torch.cuda.Event, or seconds

CLOCK = "purlin_diffusion: clock"  # a profiler's range around the waits that are the clock's own


@dataclass(frozen=True)
class Seconds:
    """Of one call. `steps` lie between the ends of consecutive steps, so there is one fewer than there are steps. `decode`: from the end of the last
    to the images: the VAE, and little else. On a GPU its stream tells the ends: a host that waited for each could launch nothing meanwhile."""

    whole: float
    steps: tuple[float, ...]
    decode: float | None = None

    @property
    def step(self) -> float | None:
        """Median of the steps; None when the call had a single one."""
        return statistics.median(self.steps) if self.steps else None


def load(options: Options, device: str) -> Any:
    """The pipeline on its device, without the libraries' bars for loading: each rank would draw its own."""
    import diffusers
    import torch
    import transformers

    from purlin_diffusion.pipelines import load as load_pipeline

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    dtype = getattr(torch, options.dtype) if options.dtype else None
    try:
        return load_pipeline(options.model, dtype=dtype, device=device)
    except OSError as error:  # a hub id that cannot be had, a folder that holds no pipeline
        raise InputError(f"--model {options.model}: {str(error).strip().splitlines()[0]}") from error


def call_arguments(options: Options) -> dict[str, Any]:
    """The model's defaults, and what the options say over them."""
    from purlin_diffusion.pipelines import defaults

    arguments: dict[str, Any] = dict(defaults(options.model))
    guidance = "true_cfg_scale" if "true_cfg_scale" in arguments else "guidance_scale"
    said = {
        "prompt": options.prompt,
        "num_inference_steps": options.steps,
        "height": options.height,
        "width": options.width,
        guidance: options.guidance,
        "num_images_per_prompt": options.images,
    }
    return {**arguments, **{name: value for name, value in said.items() if value is not None}}


def call(pipe: Any, arguments: dict[str, Any], *, seed: int, output: str = "pil") -> tuple[Any, Seconds]:
    """Draw. Returns the images (a list of PIL images; a tensor of b x 3 x h x w in 0..1, on its device, for output="pt"; latents for "latent") and
    the seconds. Raises InputError for an argument that `pipe` does not take."""
    import torch

    known = inspect.signature(pipe.__call__).parameters
    if unknown := [name for name in arguments if name not in known]:
        raise InputError(f"{type(pipe).__name__} takes no {', '.join(unknown)}")
    wait = wait_for(pipe)
    ends: list[Mark] = []
    where = None

    def step_ended(_pipe: Any, _step: int, _time: Any, kept: dict[str, Any]) -> dict[str, Any]:
        nonlocal where
        where = kept["latents"].device
        ends.append(mark(where))
        return kept

    began = now(wait)
    with refusals_in_one_line(pipe):
        result = pipe(
            **arguments,
            generator=torch.Generator().manual_seed(seed),
            output_type=output,
            callback_on_step_end=step_ended,
        )
    ends.append(mark(where))
    ended = now(wait)
    *steps, decode = (seconds(*each) for each in pairwise(ends)) if where is not None else (None,)
    return result.images, Seconds(ended - began, tuple(steps), decode)


@contextmanager
def refusals_in_one_line(pipe: Any) -> Iterator[None]:
    """A ValueError that diffusers itself raises says what is wrong with the arguments: it becomes an InputError."""
    try:
        yield
    except ValueError as error:
        if not raised_in(error).startswith("diffusers."):
            raise
        raise InputError(f"{type(pipe).__name__}: {' '.join(str(error).split())}") from error


def raised_in(error: BaseException) -> str:
    """The module whose line raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")) if frames else ""


def mark(device: Any) -> Mark:
    """When all that was launched there has been done; None, or the CPU: now."""
    import torch

    if device is None or device.type != "cuda":
        return time.perf_counter()
    with torch.cuda.device(device):
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
    return event


def seconds(first: Mark, second: Mark) -> float:
    """Between two marks of one device, when both have come."""
    took: float = second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3
    return took


def wait_for(pipe: Any) -> Callable[[], None]:
    """Waits until all GPUs that hold a part of `pipe` have done what was started on them."""
    import torch

    from purlin_core.ranges import named

    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    gpus = {x.device for part in parts for x in part.parameters() if x.is_cuda}

    def wait() -> None:
        with named(CLOCK):
            for gpu in gpus:
                torch.cuda.synchronize(gpu)

    return wait if gpus else no_wait


def now(wait: Callable[[], None]) -> float:
    """Seconds on a clock that runs on, when all that was started on the device is done."""
    wait()
    return time.perf_counter()


def no_wait() -> None:
    """On a CPU everything that was started is done."""
