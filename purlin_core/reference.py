"""What every collective means: the outputs of all ranks from the inputs of all ranks, in plain torch.

Slow and obvious; every fast path is tested against it, bitwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from purlin_core.errors import DtypeError, ShapeError, SpecError
from purlin_core.spec import Lengths, Op, Segment, Sizes, Spec, check_sizes

# dtype -> the dtype it is accumulated in
ACCUMULATOR = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.int8: torch.int8,
    torch.int16: torch.int16,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
    torch.uint8: torch.uint8,
}


def reference(spec: Spec, inputs: Sequence[Tensor], *, sizes: Sizes | None = None, op: Op = "sum") -> list[Tensor]:
    """Outputs of all ranks, contiguous and new, from `inputs`, one a rank. `op` matters to partial inputs only.

    Raises ShapeError, DtypeError, and SpecError for an unknown op.
    """
    lengths = _lengths(spec, inputs, sizes)
    ranks = range(len(inputs))
    if spec.partial:
        whole = reduce(inputs, op)
        return [_part(spec, whole, rank, lengths) for rank in ranks]
    return [_part(spec, _assemble(spec, inputs, rank, lengths), rank, lengths) for rank in ranks]


def reduce(contributions: Sequence[Tensor], op: Op) -> Tensor:
    """The contributions of all ranks made one: in rank order from the first, accumulated wide, rounded once at the end.

    Integers wrap. `avg` divides once, after the last. `max` and `min` give NaN where a rank has NaN, and the earlier
    of equals (0.0 and -0.0 are). Raises DtypeError, and SpecError for an unknown op.
    """
    dtype = contributions[0].dtype
    check_reducible(dtype, op)
    result = contributions[0].to(ACCUMULATOR[dtype])
    for contribution in contributions[1:]:
        result = _combine(result, contribution.to(ACCUMULATOR[dtype]), op)
    if op == "avg":
        result = result / torch.full_like(result, len(contributions))  # by an int, CUDA would multiply by 1/n
    return result.to(dtype)


def check_op(op: Op, *, call: str = "redistribute") -> None:
    """Raise SpecError when there is no such op."""
    if op not in get_args(Op):
        raise SpecError(f"{call}: `op` needs one of {', '.join(get_args(Op))}; got {op!r}. Compose others from these.")


def check_reducible(dtype: torch.dtype, op: Op, *, call: str = "redistribute", argument: str = "x") -> None:
    """Raise DtypeError when `op` cannot reduce `dtype`, and SpecError when there is no such op."""
    check_op(op, call=call)
    if dtype not in ACCUMULATOR:
        names = ", ".join(str(known).removeprefix("torch.") for known in ACCUMULATOR)
        raise DtypeError(
            f"{call}: `{argument}` needs a dtype that can be reduced ({names}); got {dtype}. Cast it first."
        )
    if op == "avg" and not dtype.is_floating_point:
        cure = 'Use "sum", or cast to a float first.'
        raise DtypeError(f'{call}: op "avg" needs a floating-point `{argument}`; got {dtype}. {cure}')


def _combine(result: Tensor, contribution: Tensor, op: Op) -> Tensor:
    if op in ("sum", "avg"):
        return result + contribution
    better = contribution > result if op == "max" else contribution < result
    first_nan = (contribution != contribution) & (result == result)
    return torch.where(better | first_nan, contribution, result)


def _lengths(spec: Spec, inputs: Sequence[Tensor], sizes: Sizes | None) -> Lengths:
    """The lengths that all ranks must agree on."""
    check_sizes([spec], sizes, call="reference")
    if len({x.dtype for x in inputs}) > 1:
        came = ", ".join(str(x.dtype) for x in inputs)
        raise DtypeError(f'reference "{spec}": `inputs` need one dtype; got {came}. Cast them first.')
    ranks = len(inputs)
    seen = [
        spec.lengths(x.shape, rank=rank, ranks=ranks, sizes=sizes, call="reference", argument=f"inputs[{rank}]")
        for rank, x in enumerate(inputs)
    ]
    if any(lengths != seen[0] for lengths in seen):
        came = ", ".join(str(tuple(x.shape)) for x in inputs)
        cure = "Pass `sizes` for uneven shards."
        raise ShapeError(f'reference "{spec}": `inputs` need shapes that agree; got {came}. {cure}')
    return seen[0]


def _assemble(spec: Spec, inputs: Sequence[Tensor], rank: int, lengths: Lengths) -> Tensor:
    """The whole tensor as `rank` sees it: everybody's shards put together, and its own copy of what is not sharded."""
    dim = spec.left.sharded_dim
    if dim is None:
        return inputs[rank]
    segments = spec.left.dims[dim].segments
    local = [
        torch.split(x, [lengths.shards[s.name][source] if s.sharded else lengths.whole[s.name] for s in segments], dim)
        for source, x in enumerate(inputs)
    ]
    pieces: list[Tensor] = []
    for i, segment in enumerate(segments):
        pieces += [stretches[i] for stretches in local] if segment.sharded else [local[rank][i]]
    return torch.cat(pieces, dim)


def _part(spec: Spec, whole: Tensor, rank: int, lengths: Lengths) -> Tensor:
    """What `rank` gets of the whole: dims and segments in the right side's order, shards cut out with their halos."""
    part = whole.permute(spec.order)
    for dim, right in enumerate(spec.right.dims):
        names = spec.left.dims[spec.order[dim]].names
        stretch = dict(zip(names, torch.split(part, [lengths.whole[name] for name in names], dim), strict=True))
        part = torch.cat([_shard(stretch[s.name], s, dim, rank, lengths) for s in right.segments], dim)
    return part.contiguous()  # and new: cat has copied


def _shard(stretch: Tensor, segment: Segment, dim: int, rank: int, lengths: Lengths) -> Tensor:
    if not segment.sharded:
        return stretch
    shards = lengths.shards[segment.name]
    first = sum(shards[:rank])
    last = first + shards[rank]
    if first < last:  # a rank without rows gets no halo either
        first, last = max(0, first - segment.before), min(stretch.shape[dim], last + segment.after)
    return stretch.narrow(dim, first, last - first)
