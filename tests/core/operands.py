"""Operands of contiguous tensors, for plans of one rank."""

from __future__ import annotations

from typing import TypeAlias

from purlin_core.plan import Operand, contiguous, freeze_sizes, output_shape
from purlin_core.spec import Spec

Lengths: TypeAlias = dict[str, int | list[int]]


def operand(
    text: str, *shape: int, itemsize: int = 1, rank: int = 0, ranks: int = 2, sizes: Lengths | None = None
) -> Operand:
    """Contiguous tensors."""
    spec = Spec.parse(text)
    out_shape = output_shape(spec, shape, rank, ranks, sizes)
    return Operand(spec, shape, contiguous(shape), contiguous(out_shape), itemsize, "float32", freeze_sizes(sizes))
