"""Random weights that behave: every signal stays near one, attention is sharp, and the bytes are made once, in their dtype.

The usual initialisations leave attention nearly invisible (softmax over many keys of equal weight averages the values
away), so a test would not notice when it is wrong. Here queries and keys are scaled so that each token listens to a few.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Model = TypeVar("Model", bound=nn.Module)

SHARPNESS = 1.5  # of queries and of keys: the standard deviation of the logits is its square, 2.25
QUERY_OR_KEY = re.compile(r"(^|\.)(to_q|to_k|add_q_proj|add_k_proj|norm_q|norm_k|norm_added_q|norm_added_k)\.weight$")
OUTPUT = 0.5  # of the prediction of a transformer: latents stay near one
BIAS = 0.05
TAPE = 1048573  # numbers; a prime, so that no two rows of a matrix begin at the same place


def random_model(make: Callable[[], Model], *, seed: int, dtype: torch.dtype, device: torch.device) -> Model:
    """`make()` with random weights of `dtype` on `device`, in eval mode; no other copy of a weight ever exists.

    The same seed gives the same numbers on every device, up to the rounding of `dtype`.
    """
    with _HollowTensors():
        model = make()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            empty = torch.empty(weight.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
    hollow = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if hollow and device.type != "meta":
        raise RuntimeError(
            f"random_model: the buffers {', '.join(hollow)} of {type(model).__name__} were never computed"
        )
    nn.Module.to(model, device=device, dtype=dtype)  # the buffers; diffusers' own `to` would warn about them
    fill(model, seed=seed)
    return model.eval()


@torch.no_grad()
def fill(model: nn.Module, *, seed: int) -> None:
    """Draw the weights of `model` anew, in place.

    Matrices and kernels: normal, 1 / sqrt(inputs), so that outputs are as large as inputs; embeddings: normal, 1;
    weights of norms, which some call gamma: 1; biases: normal, 0.05. Those that make queries and keys: `SHARPNESS` times that, the last: `OUTPUT`.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tapes: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    place = 0
    for name, weight in model.named_parameters():
        if weight.is_meta:
            continue
        gain = SHARPNESS if QUERY_OR_KEY.search(name) else OUTPUT if name == "proj_out.weight" else 1.0
        if (weight.ndim == 1 and name.endswith("weight")) or name.endswith("gamma"):
            weight.fill_(gain)
            continue
        scale = (
            1.0 if id(weight) in embeddings else BIAS if weight.ndim == 1 else (weight.shape[0] / weight.numel()) ** 0.5
        )
        key = (weight.dtype, weight.device)
        if key not in tapes:
            tapes[key] = torch.randn(TAPE, generator=torch.Generator().manual_seed(seed)).to(
                weight.device, weight.dtype
            )
        place = _copy_from(tapes[key], place, weight.view(-1), gain * scale)


def _copy_from(tape: Tensor, place: int, numbers: Tensor, scale: float) -> int:
    """Fill `numbers` with `scale` times an endless, repeating `tape` from `place` on; returns where it ended.

    Drawing 12e9 numbers takes a CPU minutes, copying them takes seconds.
    """
    done = 0
    while done < len(numbers):
        count = min(len(numbers) - done, len(tape) - place)
        torch.mul(tape[place : place + count], scale, out=numbers[done : done + count])
        done, place = done + count, (place + count) % len(tape)
    return place


class _HollowTensors(TorchFunctionMode):
    """Inside it `torch.empty`, of which layers make their weights, has no memory behind it; buffers are computed as ever."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            kwargs = {**(kwargs or {}), "device": "meta"}
        return func(*args, **(kwargs or {}))
