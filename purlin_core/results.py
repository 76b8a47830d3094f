"""Where what a call makes itself lies: an ordinary tensor, or with `granted_results` one of the heap, so that peers write it directly.

Ranks decide alike: by sizes, and by what lives of the heap, which is the same on ranks that make the same calls and let go of the same results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from purlin_core.errors import ShapeError
from purlin_core.heap import Heap
from purlin_core.moves import Kind
from purlin_core.prepare import Asked, Prepared, Site, prepare
from purlin_core.tune import Regime


def prepare_granted(site: Site, asked: Asked, tensors: Sequence[Tensor], out: None = None) -> Prepared:
    """prepare(), for results in the heap where they leave room for as many more, and where that is the faster way."""
    prepared = prepare(site, replace(asked, granted=True), tensors, out)
    taken = sum(math.prod(shape) * x.element_size() for shape, x in zip(prepared.out_shapes, tensors, strict=True))
    if are_granted(prepared) and 2 * taken > site.geometry.heap_bytes:
        return prepare(site, asked, tensors, out)
    return prepared


def are_granted(prepared: Prepared) -> bool:
    """Whether the call's results have to lie in the heap. Those of a reduce-scatter need not: peers read its inputs."""
    return prepared.schedule.regime is Regime.DIRECT and prepared.moves.kind is not Kind.REDUCE


def in_heap(prepared: Prepared, tensors: Sequence[Tensor], heap: Heap) -> list[Tensor] | None:
    """None where what has been granted so far leaves no room."""
    try:
        return [heap.empty(shape, x.dtype) for shape, x in zip(prepared.out_shapes, tensors, strict=True)]
    except ShapeError:
        return None


def ordinary(prepared: Prepared, tensors: Sequence[Tensor]) -> list[Tensor]:
    # new_empty(shape) is the same, and takes half a microsecond longer
    return [x.new_empty_strided(out.shape, out.strides) for out, x in zip(prepared.outputs, tensors, strict=True)]
