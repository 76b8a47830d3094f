"""Moves, run over raw bytes in plain numpy, do what the reference means; and what else planning promises."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purlin_core.alias import Memory, check_alias
from purlin_core.errors import AliasError, DtypeError, ShapeError, SpecError
from purlin_core.explain import explain, explain_moves, formulas
from purlin_core.moves import MAX_DIMS, WIRE_ALIGN, Box, Kind, Moves, Route
from purlin_core.plan import (
    AllReduce,
    Operand,
    all_to_all_moves,
    contiguous,
    cut_wire,
    freeze_sizes,
    largest_message,
    output_shape,
    plan_moves,
    received_bytes,
    seen_by,
    sent_bytes,
)
from purlin_core.reference import reduce
from purlin_core.spec import Dim, Layout, Op, Segment, Spec

Bytes: TypeAlias = npt.NDArray[np.uint8]
Strides: TypeAlias = tuple[int, ...]
Lengths: TypeAlias = dict[str, int | list[int]]

# Tensors in memory of their own, with poison around them


@dataclass(frozen=True)
class Placed:
    """A view into an arena; every other byte of the arena must stay as it is."""

    arena: Bytes
    view: Tensor

    @staticmethod
    def of(view: Tensor) -> Placed:
        arena = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
        return Placed(arena.numpy(), view)

    @staticmethod
    def anywhere(shape: Sequence[int], dtype: torch.dtype, random: Random) -> Placed:
        """Dims in any order in memory, gaps between rows, a step between elements, an odd start."""
        order = random.sample(range(len(shape)), len(shape))
        gaps = [random.choice([0, 0, 0, 1, 2]) for _ in shape]
        stride, strides = random.choice([1, 1, 1, 2]), [0] * len(shape)
        for i in order:
            strides[i] = stride
            stride *= max(shape[i], 1) + gaps[i]
        start = random.choice([0, 1, 2, 5])
        arena = torch.tensor(list(random.randbytes((stride + start + 1) * dtype.itemsize)), dtype=torch.uint8)
        return Placed.of(arena.view(dtype).as_strided(tuple(shape), strides, start))

    @property
    def first(self) -> int:
        return int(self.view.storage_offset() * self.view.element_size())

    def write(self, values: Tensor) -> None:
        self.view.copy_(values)

    def holds(self, values: Tensor) -> bool:
        def raw(x: Tensor) -> list[int]:
            return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()

        return self.view.shape == values.shape and raw(self.view) == raw(values)

    def surroundings(self) -> Bytes:
        """The arena with the view blanked out."""
        shape, strides, size = self.view.shape, self.view.stride(), self.view.element_size()
        mine = places(Box(self.first, size, tuple(shape), tuple(stride * size for stride in strides)))
        rest: Bytes = self.arena.copy()
        rest[mine] = 0
        return rest


def places(box: Box) -> npt.NDArray[np.int64]:
    """Where the bytes of a box lie, in wire order."""
    at = np.array([box.offset], np.int64)
    for extent, stride in zip(box.extents, box.strides, strict=True):
        at = (at[:, None] + np.arange(extent) * stride).reshape(-1)
    return (at[:, None] + np.arange(box.run)).reshape(-1)


# Moves, run


PADDING = 0xEE


def pack(route: Route, tensors: Sequence[Placed]) -> Bytes:
    end = max([route.lo + route.bytes, *(item.at + item.box.bytes for item in route.items)])
    wire = np.full(end, PADDING, np.uint8)
    for item in route.items:
        placed = tensors[item.tensor]
        wire[item.at : item.at + item.box.bytes] = placed.arena[places(item.box) + placed.first]
    return wire[route.lo : route.lo + route.bytes]


def unpack(route: Route, wire: Bytes, tensors: Sequence[Placed]) -> None:
    for item in route.items:
        placed = tensors[item.tensor]
        lo, hi = max(item.at, route.lo), min(item.at + item.box.bytes, route.lo + route.bytes)
        if lo < hi:
            at = places(item.box)[lo - item.at : hi - item.at] + placed.first
            placed.arena[at] = wire[lo - route.lo : hi - route.lo]


def reduced(contributions: Sequence[Bytes], dtype: torch.dtype, op: Op) -> Bytes:
    """Contributions of all ranks, whole lines of 16 bytes at a time: the padding between items is reduced, too."""
    size = len(contributions[0])
    padded = [torch.from_numpy(np.pad(wire, (0, WIRE_ALIGN - size % WIRE_ALIGN))).view(dtype) for wire in contributions]
    result: Bytes = reduce(padded, op).view(torch.uint8).numpy()[:size]
    return result


@dataclass(frozen=True)
class World:
    """All ranks of a call: their moves and their tensors."""

    moves: Sequence[Moves]
    inputs: Sequence[Sequence[Placed]]  # [ranks][tensors]
    outputs: Sequence[Sequence[Placed]]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(permutations(range(len(self.moves)), 2))

    def run(self, op: Op = "sum") -> None:
        kind = self.moves[0].kind
        if kind is Kind.COPY:
            for source, reader in self.pairs:
                self.copy(source, reader)
            for rank in range(len(self.moves)):
                self.copy_own(rank)
            return
        sums = [self.reduced_at(rank, op) for rank in range(len(self.moves))]
        for rank, moves in enumerate(self.moves):
            unpack(moves.own_to, sums[rank], self.outputs[rank])
            for source in range(len(self.moves)):
                if kind is Kind.ALL_REDUCE and source != rank:
                    unpack(moves.receive[source], sums[source], self.outputs[rank])

    def copy(self, source: int, reader: int) -> None:
        wire = pack(self.moves[source].send[reader], self.inputs[source])
        unpack(self.moves[reader].receive[source], wire, self.outputs[reader])

    def copy_own(self, rank: int) -> None:
        unpack(self.moves[rank].own_to, pack(self.moves[rank].own_from, self.inputs[rank]), self.outputs[rank])

    def reduced_at(self, rank: int, op: Op) -> Bytes:
        routes = [moves.own_from if r == rank else moves.send[rank] for r, moves in enumerate(self.moves)]
        contributions = [pack(route, self.inputs[r]) for r, route in enumerate(routes)]
        return reduced(contributions, self.inputs[rank][0].view.dtype, op)


# Calls of every kind


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


@each_kind
@many
@given(data=st.data())
def test_moves_do_what_the_spec_means(kind: str, data: st.DataObject) -> None:
    call = data.draw(calls(kind))
    world = call.world()
    expected = [
        case.spec.reference([x[i].view.clone() for x in world.inputs], sizes=case.sizes, op=call.op)
        for i, case in enumerate(call.cases)
    ]
    before = [[placed.arena.copy() for placed in row] for row in world.inputs]
    around = [[placed.surroundings() for placed in row] for row in world.outputs]
    world.run(call.op)
    for rank in range(call.ranks):
        for i in range(len(call.cases)):
            out = world.outputs[rank][i]
            assert out.holds(expected[i][rank])
            assert np.array_equal(out.surroundings(), around[rank][i])
            assert np.array_equal(world.inputs[rank][i].arena, before[rank][i])


@each_kind
@some
@given(data=st.data())
def test_both_ends_of_a_pair_count_alike(kind: str, data: st.DataObject) -> None:
    call = data.draw(calls(kind))
    moves = [moves for _, moves in call.plans()]
    for source, reader in permutations(range(call.ranks), 2):
        send, receive = moves[source].send[reader], moves[reader].receive[source]
        if moves[0].kind is Kind.ALL_REDUCE:  # the reader's slice goes there, the source's slice comes back
            assert (send.lo, send.bytes, send.payload) == wire_of(moves[reader].own_to)
            assert (receive.lo, receive.bytes, receive.payload) == wire_of(moves[source].own_to)
        else:
            assert wire_of(send) == wire_of(receive)
        if moves[0].kind is Kind.COPY:
            assert [(i.tensor, i.at, i.box.bytes) for i in send.items] == [
                (i.tensor, i.at, i.box.bytes) for i in receive.items
            ]
    for rank in range(call.ranks):
        assert wire_of(moves[rank].own_from) == wire_of(moves[rank].own_to)
        assert moves[rank].send[rank] == moves[rank].receive[rank] == Route()


def wire_of(route: Route) -> tuple[int, int, int]:
    return route.lo, route.bytes, route.payload


@each_kind
@some
@given(data=st.data())
def test_items_are_full_aligned_in_order_and_within_the_dims_of_a_box(kind: str, data: st.DataObject) -> None:
    call = data.draw(calls(kind))
    for _, moves in call.plans():
        for route in (*moves.send, *moves.receive, moves.own_from, moves.own_to):
            end = 0
            for item in route.items:
                assert item.at % WIRE_ALIGN == 0
                assert end <= item.at < end + WIRE_ALIGN
                assert item.box.bytes > 0
                assert len(item.box.extents) <= MAX_DIMS
                assert 1 not in item.box.extents
                end = item.at + item.box.bytes
            if moves.kind is Kind.COPY:
                assert (route.lo, route.bytes) == (0, end)
                assert route.payload == sum(item.box.bytes for item in route.items)


@each_kind
@some
@given(data=st.data())
def test_the_formula_counts_what_the_boxes_count(kind: str, data: st.DataObject) -> None:
    call = data.draw(calls(kind))
    plans = call.plans()
    for operands, moves in plans:
        assert sum(formula.received_bytes for formula in formulas(operands, moves)) == received_bytes(moves)
        assert all(f"{formula.received_bytes} B" in formula.text for formula in formulas(operands, moves))
    assert sum(sent_bytes(moves) for _, moves in plans) == sum(received_bytes(moves) for _, moves in plans)


@each_kind
@some
@given(data=st.data())
def test_every_rank_knows_what_the_others_bring(kind: str, data: st.DataObject) -> None:
    call = data.draw(calls(kind))
    plans = call.plans()
    largest = max(route.payload for _, moves in plans for route in moves.send)
    for rank, (operands, moves) in enumerate(plans):
        for peer, (theirs, _) in enumerate(plans):
            assert [seen_by(operand, rank, call.ranks, peer) for operand in operands] == theirs
        if moves.kind is not Kind.ALL_REDUCE:
            assert largest_message(operands, rank, call.ranks) == largest


@many
@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 4), min_size=n * n, max_size=n * n))
    ),
    st.integers(0, 3),
    st.integers(0, 1 << 30),
)
def test_all_to_all_single_takes_any_matrix(drawn: tuple[int, list[int]], columns: int, seed: int) -> None:
    ranks, flat = drawn
    rows = np.array(flat).reshape(ranks, ranks)  # rows[s][d] go from s to d
    random = Random(seed)
    shape = (columns, 2) if columns else ()
    inputs = [[Placed.anywhere((int(rows[r].sum()), *shape), torch.float16, random)] for r in range(ranks)]
    outputs = [[Placed.anywhere((int(rows[:, r].sum()), *shape), torch.float16, random)] for r in range(ranks)]
    moves = []
    for rank in range(ranks):
        x, out = inputs[rank][0].view, outputs[rank][0].view
        moves.append(
            all_to_all_moves(
                x.shape,
                x.stride(),
                out_shape=out.shape,
                out_strides=out.stride(),
                itemsize=2,
                rank=rank,
                ranks=ranks,
                in_sizes=rows[rank].tolist(),
                out_sizes=rows[:, rank].tolist(),
            )
        )
    parts = [torch.split(x[0].view, rows[r].tolist()) for r, x in enumerate(inputs)]
    expected = [torch.cat([parts[source][rank] for source in range(ranks)]) for rank in range(ranks)]
    around = [out[0].surroundings() for out in outputs]
    World(moves, inputs, outputs).run()
    for rank in range(ranks):
        assert outputs[rank][0].holds(expected[rank])
        assert np.array_equal(outputs[rank][0].surroundings(), around[rank])


@given(st.integers(0, 5000), st.integers(1, 16))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_slices_of_the_wire_cover_it_evenly(wire_bytes: int, ranks: int) -> None:
    slices = cut_wire(wire_bytes, ranks)
    assert len(slices) == ranks
    assert [lo for lo, _ in slices] == [sum(size for _, size in slices[:rank]) for rank in range(ranks)]
    assert sum(size for _, size in slices) == wire_bytes
    assert all(lo % WIRE_ALIGN == 0 for lo, size in slices if size)
    lines = [-(-size // WIRE_ALIGN) for _, size in slices]
    assert max(lines) - min(lines) <= 1
    assert lines == sorted(lines, reverse=True)


# Boxes


def operand(
    text: str, *shape: int, itemsize: int = 1, rank: int = 0, ranks: int = 2, sizes: Lengths | None = None
) -> Operand:
    """Contiguous tensors."""
    spec = Spec.parse(text)
    out_shape = output_shape(spec, shape, rank, ranks, sizes)
    return Operand(spec, shape, contiguous(shape), contiguous(out_shape), itemsize, "float32", freeze_sizes(sizes))


@pytest.mark.parametrize(
    ("text", "shape", "send", "receive"),
    [
        ("n@ -> n", (8,), [Box(0, 8)], [Box(8, 8)]),
        ("n@ a b -> n a b", (8, 3, 5), [Box(0, 120)], [Box(120, 120)]),
        ("a n@ -> a n", (3, 8), [Box(0, 24)], [Box(8, 8, (3,), (16,))]),
        ("a n@ b -> a n b", (3, 8, 5), [Box(0, 120)], [Box(40, 40, (3,), (80,))]),
        ("b s@ h d -> b s h@ d", (1, 4, 6, 8), [Box(24, 24, (4,), (48,))], [Box(96, 96)]),
        ("b s@ h d -> b s h@ d", (2, 4, 6, 8), [Box(24, 24, (8,), (48,))], [Box(96, 96, (2,), (192,))]),
        ("b s h@ d -> b s@ h d", (1, 4, 6, 8), [Box(96, 96)], [Box(48, 48, (2,), (96,))]),
        ("b s@ h d -> b h@ s d", (1, 4, 6, 8), [Box(24, 24, (4,), (48,))], [Box(32, 8, (4, 3), (8, 64))]),
        ("y@ x -> y@~1 x", (4, 10), [Box(30, 10)], [Box(40, 10)]),
    ],
)
def test_boxes_are_as_long_as_memory_allows(
    text: str, shape: tuple[int, ...], send: list[Box], receive: list[Box]
) -> None:
    moves = plan_moves([operand(text, *shape)], 0, 2)
    assert [item.box for item in moves.send[1].items] == send
    assert [item.box for item in moves.receive[1].items] == receive


def test_segments_that_touch_at_both_ends_are_one_item() -> None:
    both = plan_moves([operand("(a@ b@) -> (a b)@".replace("(a b)@", "(a@ b@)"), 7, sizes={"a": [3, 2]})], 0, 2)
    assert [item.box for item in both.own_from.items] == [Box(0, 7)]
    two = plan_moves([operand("(a@ b@) -> (a b)", 7, sizes={"a": [3, 2]})], 0, 2)
    assert [(item.at, item.box) for item in two.send[1].items] == [(0, Box(0, 3)), (16, Box(3, 4))]


def test_a_joined_all_reduce_is_cut_evenly() -> None:
    tensors = [operand("+n -> n", 20, itemsize=4, ranks=3), operand("+n -> n", 5, itemsize=4, ranks=3)]
    moves = plan_moves(tensors, 1, 3, all_reduce=AllReduce.JOINED)  # wire: [0, 80), [80, 100)
    assert moves.kind is Kind.ALL_REDUCE
    assert [wire_of(route) for route in (moves.send[0], moves.own_from, moves.send[2])] == [
        (0, 48, 48),
        (48, 32, 32),
        (80, 20, 20),
    ]
    assert all(item.box.bytes == (80, 20)[item.tensor] for route in moves.send for item in route.items)
    shot = plan_moves(tensors, 1, 3)
    assert shot.kind is Kind.REDUCE
    assert shot.send[0] == shot.send[2] == shot.own_from
    assert wire_of(shot.own_from) == (0, 100, 100)


def test_bytes_are_exact_beyond_32_bits() -> None:
    rows, heads, width = 5 << 20, 40, 128  # 51 GiB a rank, in bf16
    tensor = operand("b s@ h d -> b s h@ d", 1, rows, heads, width, itemsize=2, rank=3, ranks=8)
    moves = plan_moves([tensor] * 3, 3, 8)
    block = rows * heads * width * 2 // 8
    assert moves.send[7].items[2].at == 2 * block
    assert moves.receive[7].items[0].box == Box(7 * block, block)
    assert received_bytes(moves) == 3 * 7 * block == sum(f.received_bytes for f in formulas([tensor] * 3, moves))


def test_output_shapes_of_symbolic_shapes_are_symbolic() -> None:
    """So that torch.compile with dynamic shapes can trace the operators."""

    def outputs(x: Tensor) -> list[Tensor]:
        texts = ["s@ h -> s h@", "+s h -> s@ h", "s@ h -> s@~1 h"]
        shapes = [output_shape(Spec.parse(text), x.shape, 0, 2) for text in texts]
        assert not any(isinstance(rows, int) for rows, _ in shapes)
        return [x.new_empty(shape) for shape in shapes]

    graph = make_fx(outputs, tracing_mode="symbolic")(torch.zeros(8, 6))
    assert [tuple(out.shape) for out in graph(torch.zeros(10, 4))] == [(20, 2), (5, 4), (11, 4)]


def test_planning_an_exchange_takes_less_than_a_millisecond() -> None:
    sizes: Lengths = {"text": [84, 83, 83, 83], "image": [1024] * 4}
    tensor = operand("b (text@ image@) h d -> b (text image) h@ d", 1, 1108, 24, 128, itemsize=2, ranks=4, sizes=sizes)

    def once() -> float:
        start = time.perf_counter()
        plan_moves([tensor] * 3, 0, 4)
        return time.perf_counter() - start

    assert min(once() for _ in range(50)) < 1e-3


# Errors


def expanded(text: str) -> Operand:
    return Operand(Spec.parse(text), (2, 3), (3, 1), (0, 1), 4, "float32")


def strided_in_six_dims() -> Operand:
    spec = Spec.parse("n@ a b c d e -> n a b c d e")
    strides = (32 << 10, 1 << 10, 1 << 8, 1 << 6, 1 << 4, 4)
    return Operand(spec, (2,) * 6, strides, contiguous((4, *(2,) * 5)), 4, "float32")


@pytest.mark.parametrize(
    ("error", "operands", "parts"),
    [
        (ShapeError, list, ["exchange: `tensors` needs at least one tensor", "got none", "Leave the call out"]),
        (
            SpecError,
            lambda: [operand("n@ -> n", 2), operand("+n -> n", 2)],
            ["exchange: `specs` need all copies", 'got "n@ -> n", "+n -> n"', "a call of each kind"],
        ),
        (
            SpecError,
            lambda: [operand("+n -> n@", 2), operand("+n -> n", 2)],
            ["all reduce_scatter or all all_reduce", 'got "+n -> n@", "+n -> n"', "a call of each kind"],
        ),
        (
            DtypeError,
            lambda: [operand("+n -> n", 2), Operand(Spec.parse("+n -> n"), (2,), (1,), (1,), 4, "int32")],
            ["exchange: `tensors` of a reduction need one dtype", "got float32 and int32", "cast"],
        ),
        (
            ShapeError,
            lambda: [operand("n@ -> n", 2), Operand(Spec.parse("n -> n@"), (7,), (1,), (1,), 4)],
            ['exchange "n -> n@": `tensors[1]` needs `n` divisible by 2 ranks', "got 7 rows", "sizes={'n': [4, 3]}"],
        ),
        (
            ShapeError,
            lambda: [operand("n@ -> n", 2, sizes={"m": 4})],
            ['exchange: `sizes` needs names of "n@ -> n"', "got 'm'", "Remove it"],
        ),
        (
            ShapeError,
            lambda: [Operand(Spec.parse("n m -> n m"), (2, 3), (3, 1), (1,), 4)],
            ['exchange "n m -> n m": `out` needs 2 dims', "got 1", "Reshape it"],
        ),
        (
            AliasError,
            lambda: [expanded("n m -> n m")],
            ['exchange "n m -> n m": `out` needs memory of its own for each element', "(0, 1)", "not expanded"],
        ),
        (
            ShapeError,
            lambda: [operand("n@ -> n", 2), strided_in_six_dims()],
            ["`tensors[1]` needs at most 4 strided dims", "got 6: (2, 2, 2, 2, 2, 2)", "Make it contiguous"],
        ),
    ],
)
def test_errors_name_call_argument_need_and_cure(
    error: type[Exception], operands: Callable[[], list[Operand]], parts: list[str]
) -> None:
    with pytest.raises(error) as caught:
        plan_moves(operands(), 0, 2, call="exchange")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"in_sizes": None},
            "`in_sizes` of None needs dim 0 of `x` divisible by 2 ranks; got 5 rows. Pass in_sizes/out_s",
        ),
        (
            {"out_sizes": None},
            "`out_sizes` of None needs dim 0 of `out` divisible by 2 ranks; got 7 rows. Pass in_sizes/",
        ),
        (
            {"in_sizes": [2, 2]},
            "`in_sizes` needs 2 row counts that add up to 5, dim 0 of `x`; got [2, 2]. A rank without",
        ),
        ({"in_sizes": [6, -1]}, "`in_sizes` needs 2 row counts that add up to 5, dim 0 of `x`; got [6, -1]. A rank"),
        ({"out_sizes": [1, 2, 4]}, "`out_sizes` needs 2 row counts that add up to 7, dim 0 of `out`; got [1, 2, 4]."),
        ({"in_sizes": [3, 2]}, "rank 0 needs to give itself what it takes; got in_sizes[0] = 3, out_sizes[0] = 4."),
        ({"out_shape": (7, 4)}, "`x` and `out` need shapes that differ in dim 0 only; got (5, 3) and (7, 4). Reshape"),
        ({"shape": (), "out_shape": ()}, "`x` and `out` need shapes that differ in dim 0 only; got () and (). Reshape"),
        (
            {"out_strides": (1, 1)},
            "`out` needs memory of its own for each element; got shape (7, 3) with strides (1, 1).",
        ),
    ],
)
def test_errors_of_all_to_all_single(changes: dict[str, Any], message: str) -> None:
    right = {"shape": (5, 3), "strides": (3, 1), "out_shape": (7, 3), "out_strides": (3, 1), "itemsize": 4}
    sizes = {"in_sizes": [4, 1], "out_sizes": [4, 3], "rank": 0, "ranks": 2}
    all_to_all_moves(**{**right, **sizes})  # type: ignore[arg-type]
    with pytest.raises((ShapeError, AliasError), match=re.escape(f"all_to_all_single: {message}")):
        all_to_all_moves(**{**right, **sizes, **changes})


# Aliasing


def alias(text: str, x: Tensor, out: Tensor, *, rank: int = 1, ranks: int = 2, sizes: Lengths | None = None) -> None:
    spec = Spec.parse(text)
    tensor = Operand(spec, tuple(x.shape), x.stride(), out.stride(), x.element_size(), "", freeze_sizes(sizes))
    for all_reduce in AllReduce:
        moves = plan_moves([tensor], rank, ranks, all_reduce=all_reduce)
        check_alias(moves, [Memory.of("x", x)], [Memory.of("out", out)], specs=[spec])


def halves(dim: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """A whole tensor and rank 1's half of it."""
    whole = torch.zeros(4, size, 6)
    return whole, whole.chunk(2, dim)[1]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_three_forms_in_place_are_allowed_along_any_dim(dim: int) -> None:
    whole, mine = halves(dim)
    sharded, dims = " ".join("abc"[i] + "@" * (i == dim) for i in range(3)), "a b c"
    alias(f"{sharded} -> {dims}", mine, whole)
    alias(f"+{dims} -> {sharded}", whole, mine)
    alias(f"+{dims} -> {dims}", mine, mine)
    with pytest.raises(AliasError):  # the other rank's shard
        alias(f"{sharded} -> {dims}", whole.chunk(2, dim)[0], whole)
    with pytest.raises(AliasError):
        alias(f"+{dims} -> {sharded}", whole, whole.chunk(2, dim)[0])


def test_in_place_own_boxes_name_the_same_bytes() -> None:
    whole, mine = halves(1)
    tensor = Operand(Spec.parse("a b@ c -> a b c"), tuple(mine.shape), mine.stride(), whole.stride(), 4)
    moves = plan_moves([tensor], 1, 2)
    (read,), (written,) = moves.own_from.items, moves.own_to.items
    assert mine.data_ptr() + read.box.offset == whole.data_ptr() + written.box.offset
    assert (read.box.extents, read.box.strides) == (written.box.extents, written.box.strides)


@pytest.mark.parametrize("text", ["a b@ c -> a b c", "+a b c -> a b@ c"])
@pytest.mark.parametrize("seed", range(5))
def test_in_place_gathers_and_scatters_need_no_order(text: str, seed: int) -> None:
    """Whatever rank is first: no one reads what another has written."""
    spec, ranks, random = Spec.parse(text), 4, Random(seed)
    wholes = [torch.randint(0, 99, (3, 8, 2)) for _ in range(ranks)]
    mine = [whole.chunk(ranks, 1)[rank] for rank, whole in enumerate(wholes)]
    inputs, outputs = (wholes, mine) if spec.partial else (mine, wholes)
    expected = spec.reference([x.clone() for x in inputs])
    moves = []
    for rank, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
        tensor = Operand(spec, tuple(x.shape), x.stride(), out.stride(), 8, "int64")
        moves.append(plan_moves([tensor], rank, ranks))
        check_alias(moves[rank], [Memory.of("x", x)], [Memory.of("out", out)], specs=[spec])
    world = World(moves, [[Placed.of(x)] for x in inputs], [[Placed.of(out)] for out in outputs])
    for rank in random.sample(range(ranks), ranks):
        if spec.partial:
            unpack(moves[rank].own_to, world.reduced_at(rank, "sum"), world.outputs[rank])
        for source in random.sample(range(ranks), ranks):
            if not spec.partial and source != rank:
                world.copy(source, rank)
    for out, whole in zip(outputs, expected, strict=True):
        assert torch.equal(out, whole)


@pytest.mark.parametrize(
    ("text", "x", "out", "sizes"),
    [
        ("s@ h -> s h@", (0, (4, 8), (8, 1)), (0, (8, 4), (4, 1)), {}),
        ("s@ h -> s@ h", (0, (4, 8), (8, 1)), (0, (4, 8), (8, 1)), {}),
        ("h -> h", (0, (4,), (1,)), (0, (4,), (1,)), {}),
        ("y@ h -> y@~1 h", (8, (4, 8), (8, 1)), (0, (5, 8), (8, 1)), {}),
        ("n@ -> n", (3, (4,), (1,)), (0, (8,), (1,)), {}),  # its shard would begin at 4
        ("+n -> n@", (0, (8,), (1,)), (3, (4,), (1,)), {}),
        ("+n -> n", (0, (8,), (1,)), (1, (8,), (1,)), {}),
        ("+a b -> b a", (0, (4, 4), (4, 1)), (0, (4, 4), (4, 1)), {}),  # its transpose, not itself
        ("+a b -> a b", (0, (3, 2), (4, 1)), (0, (3, 2), (6, 1)), {}),
        ("+n -> n", (0, (1,), (1,)), (0, (1,), (2,)), None),  # allowed: one element
    ],
)
def test_any_other_overlap_is_refused(
    text: str,
    x: tuple[int, tuple[int, ...], tuple[int, ...]],
    out: tuple[int, tuple[int, ...], tuple[int, ...]],
    sizes: Lengths | None,
) -> None:
    arena = torch.zeros(64)
    source, target = (arena.as_strided(shape, strides, start) for start, shape, strides in (x, out))
    if sizes is None:
        alias(text, source, target)
        return
    message = f'redistribute "{text}": `out` needs memory of its own; got bytes in ['
    with pytest.raises(AliasError, match=re.escape(message)) as caught:
        alias(text, source, target, sizes=sizes)
    assert "that it shares with `x`. Pass another tensor" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "x", "out", "sizes"),
    [
        # rows 2 and 3 of the image, no part of the own shard, lie where rank 0 writes its text
        ("(image text@) -> (image@ text)", 6, 6, {"image": [0, 2, 2], "text": [2, 2, 0]}),
        # text is summed on every rank: the peers still read what the output overwrites
        ("+(text image) -> (text image@)", 6, 4, {"image": [0, 2, 2]}),
    ],
)
def test_an_own_part_in_place_is_not_enough(text: str, x: int, out: int, sizes: Lengths) -> None:
    arena, spec = torch.zeros(6), Spec.parse(text)
    moves = plan_moves([Operand(spec, (x,), (1,), (1,), 4, "", freeze_sizes(sizes))], 1, 3)
    assert [item.box for item in moves.own_from.items] == [item.box for item in moves.own_to.items]
    with pytest.raises(AliasError):
        alias(text, arena[:x], arena[:out], ranks=3, sizes=sizes)


def test_one_tensor_in_place_does_not_excuse_another() -> None:
    spec = Spec.parse("n@ -> n")
    first, second = torch.zeros(8), torch.zeros(8)
    tensors = [Operand(spec, (4,), (1,), (1,), 4)] * 2
    moves = plan_moves(tensors, 1, 2)

    def check(inputs: list[Tensor], outputs: list[Tensor]) -> None:
        ins = [Memory.of(f"tensors[{i}]", x) for i, x in enumerate(inputs)]
        outs = [Memory.of(f"out[{i}]", x) for i, x in enumerate(outputs)]
        check_alias(moves, ins, outs, specs=[spec] * 2, call="exchange")

    check([first[4:], second[4:]], [first, second])
    check([first[4:], first[4:]], [torch.zeros(8), second])  # inputs may be one
    with pytest.raises(AliasError, match=r"`out\[0\]` needs memory of its own; got .* `tensors\[1\]`"):
        check([first[4:], first[4:]], [first, second])
    with pytest.raises(AliasError, match=r"`out\[1\]` needs memory of its own; got .* `tensors\[0\]`"):
        check([second[4:], first[4:]], [torch.zeros(8), second])
    with pytest.raises(AliasError, match=r"`out\[1\]` needs memory of its own; got .* `out\[0\]`"):
        check([torch.zeros(4), torch.zeros(4)], [first, first])


def test_without_specs_nothing_is_allowed_in_place() -> None:
    x = torch.zeros(4, 2)
    moves = all_to_all_moves((4, 2), (2, 1), out_shape=(4, 2), out_strides=(2, 1), itemsize=4, rank=0, ranks=2)
    with pytest.raises(AliasError, match="all_to_all_single: `out` needs memory of its own"):
        check_alias(moves, [Memory.of("x", x)], [Memory.of("out", x)], call="all_to_all_single")


def test_interleaved_views_do_not_share() -> None:
    """Keys and values gathered side by side, into one tensor."""
    spec = Spec.parse("s@ d -> s d")
    for pair in (torch.zeros(8, 2, 3).unbind(1), torch.zeros(2, 3, 8).permute(2, 1, 0).unbind(2)):
        tensors = [Operand(spec, (4, 3), (3, 1), out.stride(), 4) for out in pair]
        moves = plan_moves(tensors, 0, 2)
        inputs = [Memory.of(name, torch.zeros(4, 3)) for name in "kv"]
        check_alias(moves, inputs, [Memory.of(name, out) for name, out in zip(["out[0]", "out[1]"], pair, strict=True)])


def test_elements_of_other_sizes_share_when_a_byte_does() -> None:
    arena = torch.zeros(16, dtype=torch.uint8)
    moves = plan_moves([operand("n -> n", 1)], 0, 1)
    words, byte = arena.view(torch.float32)[::2], arena[5::8]  # bytes 0-3 and 8-11; bytes 5 and 13
    check_alias(moves, [], [Memory.of("words", words), Memory.of("byte", byte)])
    for inside in (arena[1::8], arena[3::8], arena[11:14]):
        for pair in ((words, inside), (inside, words)):
            with pytest.raises(AliasError):
                check_alias(moves, [], [Memory.of("first", pair[0]), Memory.of("second", pair[1])])


def test_an_empty_view_shares_nothing() -> None:
    arena = torch.zeros(8)
    whole = Memory.of("whole", arena)
    empty = Memory("empty", arena.data_ptr() + 16, (0,), (1,), 4)  # torch gives empty tensors the address 0
    moves = plan_moves([operand("n -> n", 1)], 0, 1)
    for pair in ([whole, empty], [empty, whole], [empty, empty]):
        check_alias(moves, [], pair)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_sharing_is_found_byte_by_byte(data: st.DataObject) -> None:
    """Views of one arena that slice it along its own dims: refused exactly when they have a byte in common."""
    arena = torch.zeros(5, 4, 6)
    cuts = st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 3))
    views = []
    for _ in range(2):
        index = tuple(slice(lo, lo + length, step) for lo, length, step in data.draw(st.tuples(cuts, cuts, cuts)))
        views.append(arena[index])
    first, second = (Memory.of(f"out[{i}]", view) for i, view in enumerate(views))
    held = [torch.zeros_like(arena, dtype=torch.int64) for _ in views]
    for mark, view in zip(held, views, strict=True):
        mark.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
    share = bool((held[0] * held[1]).any())
    moves = plan_moves([operand("n -> n", 1)], 0, 1)
    try:
        check_alias(moves, [], [first, second])
        assert not share
    except AliasError:
        assert share


# Explaining


def test_explain_shows_formula_peers_bytes_and_boxes() -> None:
    tensor = operand("s@ h -> s h@", 4, 6, itemsize=2, rank=1, ranks=2)
    text = explain([tensor], plan_moves([tensor], 1, 2))
    assert text.split("\n") == [
        "all_to_all of s: output - own block = 48 - 24 = 24 B",
        "rank 1 of 2: sends 24 B, receives 24 B",
        "  peer        bytes  boxes: tensor+offset[extent/stride ...]:run",
        "  to 0           24  0+0[4/12]:6",
        "from 0           24  0+0:24",
        "   own           24  0+6[4/12]:6",
        "  into           24  0+24:24",
    ]


@pytest.mark.parametrize(
    ("text", "shape", "joined", "formula"),
    [
        ("n@ -> n", (4,), False, "all_gather of n: output - own shard = 32 - 16 = 16 B"),
        (
            "(text@ image@) -> (text image@)",
            (4,),
            False,
            "all_gather of text image: output - own shard = 24 - 16 = 8 B",
        ),
        ("y@ x -> y@~1 x", (4, 2), False, "halo of y: output - own rows = 40 - 32 = 8 B"),
        ("+n -> n@", (8,), False, "reduce_scatter: (ranks - 1) x my part = 1 x 16 = 16 B"),
        ("+n -> n", (8,), False, "all_reduce: (ranks - 1) x my part = 1 x 32 = 32 B"),
        ("+n -> n", (8,), True, "all_reduce, joined: (ranks - 1) x my slice + other slices = 1 x 16 + 16 = 32 B"),
        ("n -> n@", (8,), False, "local: 0 B"),
    ],
)
def test_formulas_read_well(text: str, shape: tuple[int, ...], joined: bool, formula: str) -> None:
    sizes: Lengths = {"text": [2, 2]} if "text" in text else {}
    tensor = operand(text, *shape, itemsize=4, sizes=sizes)
    moves = plan_moves([tensor], 0, 2, all_reduce=AllReduce.JOINED if joined else AllReduce.ONE_SHOT)
    assert [f.text for f in formulas([tensor], moves)] == [formula]
    assert formula in explain([tensor], moves)
    assert formulas([tensor], moves)[0].received_bytes == received_bytes(moves)


def test_explain_shows_slices_and_counts_what_it_leaves_out() -> None:
    tensors = [operand("+n -> n", 8, itemsize=4)] * 6
    lines = explain(tensors, plan_moves(tensors, 0, 2, all_reduce=AllReduce.JOINED)).split("\n")
    assert lines[3] == "  to 1           96  [96, 192) of 0+0:32  1+0:32  2+0:32  3+0:32  and 2 more"
    lines = explain(tensors, plan_moves(tensors, 0, 2)).split("\n")
    assert lines[5] == "5: all_reduce: (ranks - 1) x my part = 1 x 32 = 32 B"
    moves = all_to_all_moves((4,), (1,), out_shape=(4,), out_strides=(1,), itemsize=1, rank=0, ranks=2)
    assert explain_moves(moves).startswith("rank 0 of 2: sends 2 B, receives 2 B\n")


@pytest.mark.parametrize("shape", [(), (0,), (5,), (0, 3), (3, 0, 2), (1, 4, 1), (2, 3, 4)])
def test_contiguous_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert contiguous(shape) == torch.empty(shape).stride()
