"""How bytes are cut: boxes as long as memory allows, slices of the wire as even as its lines allow, exact beyond 32 bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from purlin_core.explain import formulas
from purlin_core.moves import WIRE_ALIGN, Box, Kind
from purlin_core.plan import (
    AllReduce,
    contiguous,
    cut_wire,
    plan_moves,
    received_bytes,
)
from tests.core.operands import operand
from tests.core.placed import wire_of


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


@pytest.mark.parametrize("shape", [(), (0,), (5,), (0, 3), (3, 0, 2), (1, 4, 1), (2, 3, 4)])
def test_contiguous_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert contiguous(shape) == torch.empty(shape).stride()
