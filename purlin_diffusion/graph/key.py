"""What makes two calls the same to a graph: the structure of their arguments, numbers and texts by value, and what torch keeps beside them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from purlin_diffusion.doors.seen import active_backend
from purlin_diffusion.tree import leaves
from purlin_diffusion.workers import Ambience

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
_TENSORS = (Tensor, nn.Parameter)
_FLAGS: tuple[Callable[[], Hashable], ...] = (
    torch.get_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled,
    lambda: torch.backends.cudnn.allow_tf32,
    lambda: torch.backends.cudnn.benchmark,
    lambda: torch.backends.cudnn.deterministic,
    lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)


@dataclass(frozen=True)
class Key:
    """`state` is the model's, see state.py: when it changes, all recordings are stale. `unfit`: why this call cannot be a graph; empty if it can."""

    state: Hashable
    call: Hashable
    unfit: str = ""


def key_of(arguments: Mapping[str, Any], state: Hashable, unfit: str) -> Key:
    """The key of a call with `arguments` here and now, on this thread."""
    facts = []
    # a build of torch without CUDA cannot be asked
    captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
    strange = "the caller captures a graph of its own" if captured else ""
    for path, value in leaves(arguments):
        fact = _fact(value)
        if fact is None:
            strange = strange or f"`{path}` is a {type(value).__name__}, of which it cannot be seen whether it changed"
        facts.append((path, fact))
    return Key(state, (tuple(facts), _surroundings()), unfit or strange)


def _fact(value: Any) -> Hashable:
    """All of an argument that a graph depends on; None where that is not known."""
    if type(value) in _TENSORS and value.layout is torch.strided:
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, _PLAIN) or (isinstance(value, (list, tuple, Mapping)) and not value):
        return type(value), repr(value)  # texts, for 0.0 == -0.0 and 1 == True
    return None


def _surroundings() -> Hashable:
    return Ambience.here(), active_backend(), tuple(map(_flag, _FLAGS))


def _flag(read: Callable[[], Hashable]) -> Hashable:
    try:
        return read()
    except RuntimeError as error:  # torch refuses to read a flag whose newer name was set
        return str(error)
