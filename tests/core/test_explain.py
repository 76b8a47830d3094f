"""What a plan says of itself: peers, bytes and boxes, and a formula that counts what the boxes count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purlin_core.explain import explain, explain_moves, formulas
from purlin_core.plan import (
    AllReduce,
    all_to_all_moves,
    plan_moves,
    received_bytes,
    sent_bytes,
)
from tests.core.drawn_calls import calls, each_kind, some
from tests.core.operands import Lengths, operand


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
