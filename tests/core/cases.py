"""Random calls of every kind, small, with what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import torch
from torch import Tensor

from purlin_core.spec import Layout, Op, Spec
from tests.core.worlds import random_tensor, spread

Lengths: TypeAlias = dict[str, list[int] | int]

COPIES = (
    "n@ -> n",
    "n -> n",
    "n@ -> n@",
    "n -> n@",
    "s@ h -> s h",
    "s h@ -> h s",
    "s@ h -> s h@",
    "s@ h -> h@ s",
    "b s@ h d -> b s h@ d",
    "b s h@ d -> s@ b d h",
    "b h s d@ -> b h@ s d",
    "y@ x -> y@~1 x",
    "y@ x -> x y@~2:0",
    "c y@ x -> c y@~0:3 x",
    "b (text@ image@) h -> b (text image) h",
    "b (text image@) h -> b (image text) h@",
    "b (text@ image@) h d -> b (image text) h@ d",
)
REDUCTIONS = ("+n -> n", "+n -> n@", "+a b -> a@ b", "+a b -> b a@", "+a b c -> c a b", "+(t i) h -> (t@ i@) h")

COPY_DTYPES = (
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
SUM_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
)


@dataclass(frozen=True)
class Case:
    """One call: what each rank passes, and what each must get."""

    spec: str
    inputs: tuple[Tensor, ...]  # [ranks]
    expected: tuple[Tensor, ...]  # [ranks]
    sizes: Lengths
    op: Op = "sum"

    def __str__(self) -> str:
        shapes = [tuple(x.shape) for x in self.inputs]
        return f'"{self.spec}" {shapes} {self.inputs[0].dtype} sizes={self.sizes} op={self.op}'


def copy_case(spec: str, ranks: int, random: Random) -> Case:
    lengths = _lengths(Spec.parse(spec), ranks, random)
    dtype = random.choice(COPY_DTYPES)
    shapes = [_shape(Spec.parse(spec).left, lengths, rank) for rank in range(ranks)]
    inputs = [random_tensor(shape, dtype, random.getrandbits(30)) for shape in shapes]
    return _case(spec, inputs, lengths, "sum", random)


def sum_case(spec: str, ranks: int, random: Random) -> Case:
    lengths = _lengths(Spec.parse(spec), ranks, random)
    dtype = random.choice(SUM_DTYPES)
    ops: list[Op] = ["sum", "max", "min", *(["avg"] * dtype.is_floating_point)]  # type: ignore[list-item]
    shape = _shape(Spec.parse(spec).left, lengths, 0)
    inputs = [numbers(shape, dtype, random.getrandbits(30)) for _ in range(ranks)]
    return _case(spec, inputs, lengths, random.choice(ops), random)


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Values to add up: for floats of all magnitudes, with a few zeros of both signs, infinities and NaNs; for ints of the whole range."""
    if not dtype.is_floating_point:
        return random_tensor(shape, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    x *= torch.exp2(torch.randint(-18, 12, tuple(shape), generator=generator))
    strange = torch.randint(0, 60, tuple(shape), generator=generator)
    for code, value in enumerate((0.0, -0.0, float("inf"), float("-inf"), float("nan"))):
        x[strange == code] = value
    return x.to(dtype)


def _case(spec: str, inputs: list[Tensor], lengths: Lengths, op: Op, random: Random) -> Case:
    sizes = _sizes(Spec.parse(spec), lengths)
    expected = Spec.parse(spec).reference(inputs, sizes=sizes, op=op)
    laid = [spread(x) if random.random() < 0.3 else x for x in inputs]
    return Case(spec, tuple(laid), tuple(expected), sizes, op)


def _lengths(spec: Spec, ranks: int, random: Random) -> Lengths:
    """Rows of every name: a list a rank where it is sharded on either side, often uneven, sometimes with zeros."""
    lengths: Lengths = {}
    for name, segment in spec.left.segments.items():
        if not segment.sharded and not spec.right.segments[name].sharded:
            lengths[name] = random.choice((1, 2, 3, 5))
        elif random.random() < 0.4:
            lengths[name] = [random.choice((1, 2, 4))] * ranks
        else:
            lengths[name] = [random.choice((0, 1, 1, 2, 3, 5)) for _ in range(ranks)]
    return lengths


def _shape(side: Layout, lengths: Lengths, rank: int) -> tuple[int, ...]:
    return tuple(sum(_rows(lengths[s.name], rank, sharded=s.sharded) for s in dim.segments) for dim in side.dims)


def _rows(rows: list[int] | int, rank: int, *, sharded: bool) -> int:
    if isinstance(rows, int):
        return rows
    return rows[rank] if sharded else sum(rows)


def _sizes(spec: Spec, lengths: Lengths) -> Lengths:
    """Only what the tensors do not say themselves."""
    grouped = {name for dim in spec.left.dims for name in dim.names if len(dim.names) > 1}
    return {name: rows for name, rows in lengths.items() if isinstance(rows, list) or name in grouped}
