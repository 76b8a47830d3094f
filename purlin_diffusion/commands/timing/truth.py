"""How far a mode is from what the same weights say in float32, beside how far one rank of the same dtype is: rounding is no error of ours, more
is."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from purlin_diffusion.commands.options import Options
from purlin_diffusion.commands.picture import call, call_arguments
from purlin_diffusion.commands.timing.memory import give_back
from purlin_diffusion.commands.timing.opened import named_denoisers
from purlin_diffusion.commands.timing.steps import Outputs, seen_outputs

MOST = 1.2  # times one rank's error that a mode may have
EMBEDDING = "time_text_embed"  # what FLUX and SD3 call it
ROOM_BYTES = 8e9  # of a forward in float32, beside its weights


@dataclass(frozen=True)
class Truth:
    """In float32, on the CPU: of the first step what the denoiser says, and the latents at the end."""

    first: Any
    last: Any


@dataclass(frozen=True)
class Error:
    """Root mean square of the difference from the truth over that of the truth: of one denoiser call, and of the latents at the end."""

    call: float
    picture: float

    @staticmethod
    def of(outputs: Outputs, truth: Truth) -> Error:
        return Error(_apart(outputs.first, truth.first), _apart(outputs.last, truth.last))

    def over(self, one: Error) -> tuple[float, float] | None:
        """How many times that of `one`; None where `one` is the truth itself."""
        return (self.call / one.call, self.picture / one.picture) if one.call and one.picture else None


def truths(pipe: Any, sizes: Sequence[Options]) -> list[Truth]:
    """Of each size, by one rank. A copy of the denoiser in float32 is made for it, and is gone afterwards."""
    import torch

    starts = []
    for options in sizes:
        with embedded(pipe) as times:
            starts.append((options, _drawn(pipe, options), times))
    if pipe.dtype == torch.float32:
        return [Truth(_kept(seen.first), _kept(seen.last)) for _, seen, _ in starts]
    exact = in_float32(pipe)
    try:
        found = []
        for options, start, times in starts:
            with embedded(exact, instead=times):
                seen = _drawn(exact, options, latents=start.start.float())  # torch draws other noise in another dtype
            found.append(Truth(_kept(seen.first), _kept(seen.last)))
        return found
    finally:
        del exact
        give_back()


@contextmanager
def embedded(pipe: Any, instead: Sequence[Any] = ()) -> Iterator[list[Any]]:
    """What the denoiser's embedding of times and guidance is given inside, call by call; `instead` of it, what another was given.

    bfloat16 makes 3504 of a guidance of 3500, whose sine is another: an input of the model that is no error of its arithmetic.
    """
    given: list[Any] = []
    turn = iter(instead)

    def look(_module: Any, args: tuple[Any, ...]) -> Any:
        given.append(args)
        return widened(next(turn)) if instead else None

    modules = [getattr(model, EMBEDDING) for _, model in named_denoisers(pipe) if hasattr(model, EMBEDDING)]
    hooks = [module.register_forward_pre_hook(look) for module in modules]
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()


def in_float32(pipe: Any) -> Any:
    """A pipeline whose denoisers have the same weights in float32; texts are what `pipe` makes of them."""
    import torch

    def wide(x: torch.Tensor) -> torch.Tensor:
        more = x.detach().float() if x.is_floating_point() else x
        return torch.nn.Parameter(more, requires_grad=False) if isinstance(x, torch.nn.Parameter) else more

    def encode_prompt(_self: Any, *args: Any, **kwargs: Any) -> Any:
        return widened(pipe.encode_prompt(*args, **kwargs))

    other = copy.copy(pipe)
    for name, model in named_denoisers(pipe):
        memo: dict[int, Any] = {id(x): wide(x) for x in _tensors(model)}
        setattr(other, name, copy.deepcopy(model, memo))
    other.encode_prompt = types.MethodType(encode_prompt, other)
    return other


def widened(value: Any) -> Any:
    """With every floating-point tensor in it in float32."""
    from purlin_diffusion.tree import map_tensors

    return map_tensors(value, lambda x: x.float() if x.is_floating_point() else x)


def no_room(pipe: Any) -> str:
    """Why a copy in float32 has no room beside `pipe` on its GPU; empty where it has, and on a CPU."""
    import torch

    if pipe.device.type != "cuda" or pipe.dtype == torch.float32:
        return ""
    needed = ROOM_BYTES + 4 * sum(x.numel() for _, model in named_denoisers(pipe) for x in _tensors(model))
    there = torch.cuda.mem_get_info(pipe.device)[0]
    return "" if needed <= there else f"needs {needed / 1e9:.0f} GB beside the pipeline; {there / 1e9:.0f} GB are free"


def _tensors(model: Any) -> list[Any]:
    return [*model.parameters(), *model.buffers()]


def _drawn(pipe: Any, options: Options, **changes: Any) -> Outputs:
    with seen_outputs(pipe) as seen:
        call(pipe, call_arguments(options) | changes, seed=options.seed, output="latent")
    return seen


def _kept(x: Any) -> Any:
    return x.detach().float().cpu()


def _apart(x: Any, truth: Any) -> float:
    import torch

    scale = torch.linalg.vector_norm(truth.double())
    return float(torch.linalg.vector_norm(x.detach().cpu().double() - truth.double()) / scale)
