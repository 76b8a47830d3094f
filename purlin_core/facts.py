"""All of tensors that a plan depends on, and where they lie. Every call asks: so torch is asked once for all, and natively where it can be."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from purlin_core import _cpu
from purlin_core.memory import address_of

_look = _cpu.Tensors(Tensor).look


def facts_of(tensors: Sequence[Tensor]) -> tuple[Hashable, list[int]]:
    """The facts, equal for tensors that one plan serves; and the addresses, as address_of() has them."""
    grad = torch.is_grad_enabled()
    for x in tensors:
        if x.is_neg() or (grad and x.requires_grad):  # planning refuses them by name
            return told_by_name(tensors)
    return _look(tensors) or told_by_name(tensors)


def told_by_name(tensors: Sequence[Tensor]) -> tuple[Hashable, list[int]]:
    """facts_of(), asked of each tensor in Python."""
    return tuple([_facts(x) for x in tensors]), [address_of(x) for x in tensors]


def _facts(x: Tensor) -> tuple[Any, ...]:
    try:
        lazy = x.is_conj(), x.is_neg()
        return x.shape, x.stride(), x.dtype, x.device, lazy, x.requires_grad and torch.is_grad_enabled()
    except RuntimeError:  # some sparse tensors have no strides: planning refuses them by name
        return (x.layout,)
