"""Calls of every kind for all ranks, drawn by hypothesis: specs, lengths, strides, dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from purlin_core.moves import Moves
from purlin_core.plan import (
    AllReduce,
    Operand,
    contiguous,
    freeze_sizes,
    output_shape,
    plan_moves,
)
from purlin_core.spec import Dim, Layout, Op, Segment, Spec
from tests.core.operands import Lengths
from tests.core.placed import Placed, World

Strides: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One tensor of a call, for all ranks."""

    spec: Spec
    sizes: Lengths
    shapes: list[tuple[int, ...]]  # of the inputs, by rank
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    ranks: int
    cases: list[Case]
    all_reduce: AllReduce
    op: Op
    seed: int

    def operands(self, rank: int, strides: Sequence[Strides], out_strides: Sequence[Strides]) -> list[Operand]:
        return [
            Operand(c.spec, c.shapes[rank], x, out, c.dtype.itemsize, str(c.dtype), freeze_sizes(c.sizes))
            for c, x, out in zip(self.cases, strides, out_strides, strict=True)
        ]

    def out_shape(self, case: Case, rank: int) -> tuple[int, ...]:
        return output_shape(case.spec, case.shapes[rank], rank, self.ranks, case.sizes)

    def world(self) -> World:
        random = Random(self.seed)
        ranks = range(self.ranks)
        inputs = [[Placed.anywhere(c.shapes[rank], c.dtype, random) for c in self.cases] for rank in ranks]
        outputs = [[Placed.anywhere(self.out_shape(c, rank), c.dtype, random) for c in self.cases] for rank in ranks]
        if self.cases[0].spec.partial:
            for placed in (placed for row in inputs for placed in row):
                numbers = torch.tensor([random.uniform(0, 99) for _ in range(placed.view.numel())])
                placed.write(numbers.reshape(placed.view.shape))
        moves = []
        for rank in ranks:
            operands = self.operands(
                rank, [x.view.stride() for x in inputs[rank]], [out.view.stride() for out in outputs[rank]]
            )
            moves.append(plan_moves(operands, rank, self.ranks, all_reduce=self.all_reduce))
        return World(moves, inputs, outputs)

    def plans(self) -> list[tuple[list[Operand], Moves]]:
        """Operands and moves of every rank, contiguous tensors."""
        plans = []
        for rank in range(self.ranks):
            strides = [contiguous(c.shapes[rank]) for c in self.cases]
            out_strides = [contiguous(self.out_shape(c, rank)) for c in self.cases]
            operands = self.operands(rank, strides, out_strides)
            plans.append((operands, plan_moves(operands, rank, self.ranks, all_reduce=self.all_reduce)))
        return plans


ANY_DTYPE = [torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex128]
REDUCIBLE = [torch.uint8, torch.int16, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]
COPIES = ["all_gather", "all_to_all", "halo", "local"]
REDUCTIONS = ["reduce_scatter", "all_reduce"]


@st.composite
def cases(draw: st.DrawFn, ranks: int, kind: str, dtype: torch.dtype) -> Case:
    """A spec of 1 to 4 dims, one of them perhaps of segments; sharded anywhere; dims and segments permuted; lengths."""

    def some_of(names: Sequence[str]) -> set[str]:
        return draw(st.sets(st.sampled_from(names), min_size=1))

    groups = [[name] for name in "abcd"[: draw(st.sampled_from([2, 3, 4, 1]))]]
    joint = draw(st.integers(0, len(groups) - 1))
    groups[joint] += ["x", "y"][: draw(st.sampled_from([0, 0, 1, 2]))]
    left, right, rows = set[str](), set[str](), (0, 0)
    if kind in ("all_gather", "all_to_all", "halo"):
        left = some_of(draw(st.sampled_from(groups)))
    if kind in ("all_to_all", "local", "reduce_scatter"):
        right = some_of(draw(st.sampled_from(groups)))
    if kind == "halo":
        right, rows = some_of(sorted(left)), draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))

    def side(order: Sequence[Sequence[str]], sharded: set[str], halo: tuple[int, int]) -> Layout:
        return Layout(tuple(Dim(tuple(segment(name, sharded, halo) for name in group)) for group in order))

    def segment(name: str, sharded: set[str], halo: tuple[int, int]) -> Segment:
        return Segment(name, name in sharded, *(halo if name in left & right else (0, 0)))

    order = [draw(st.permutations(group)) for group in draw(st.permutations(groups))]
    spec = Spec(side(groups, left, (0, 0)), side(order, right, rows), kind in REDUCTIONS)
    shards: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    for name in spec.left.segments:
        if name in left | right:
            shards[name] = draw(st.one_of(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks), equal(ranks)))
            lengths[name] = sum(shards[name])
        else:
            lengths[name] = draw(st.sampled_from([2, 3, 1, 4, 2, 3, 1, 0]))
    shapes = [
        tuple(sum(shards[n][rank] if n in left else lengths[n] for n in group) for group in groups)
        for rank in range(ranks)
    ]
    sizes: Lengths = {**lengths, **shards}
    for group in groups:  # what may be left out: one name of a dim, if its shards are equal
        name = draw(st.sampled_from(group))
        if len(set(shards.get(name, [0]))) == 1 and draw(st.booleans()):
            del sizes[name]
    return Case(spec, sizes, shapes, dtype)


def equal(ranks: int) -> st.SearchStrategy[list[int]]:
    return st.sampled_from([1, 2, 3, 0]).map(lambda rows: [rows] * ranks)


@st.composite
def calls(draw: st.DrawFn, kind: str) -> Call:
    """A call of some tensors, the first of this kind; copies of other kinds may come with it."""
    ranks = draw(st.sampled_from([3, 2, 4, 5, 8, 7, 6, 1]))
    others = draw(st.sampled_from([0, 0, 1, 2]))
    kinds = [kind, *(draw(st.sampled_from(COPIES if kind in COPIES else [kind])) for _ in range(others))]
    dtypes = [draw(st.sampled_from(ANY_DTYPE if kind in COPIES else REDUCIBLE)) for _ in kinds]
    tensors = [draw(cases(ranks, k, t if kind in COPIES else dtypes[0])) for k, t in zip(kinds, dtypes, strict=True)]
    op: Op = draw(st.sampled_from(["sum", "avg", "max", "min"] if dtypes[0].is_floating_point else ["sum", "max"]))
    return Call(
        ranks, tensors, draw(st.sampled_from([AllReduce.JOINED, AllReduce.ONE_SHOT])), op, draw(st.integers(0, 1 << 30))
    )


each_kind = pytest.mark.parametrize("kind", [*COPIES, *REDUCTIONS])
many = settings(max_examples=120, deadline=None, derandomize=True)
some = settings(max_examples=40, deadline=None, derandomize=True)
