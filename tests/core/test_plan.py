"""What else planning promises: shapes that may be symbols, little time, and errors that name the call, the argument, the need and the cure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purlin_core.errors import AliasError, DtypeError, ShapeError, SpecError
from purlin_core.plan import (
    Operand,
    all_to_all_moves,
    contiguous,
    output_shape,
    plan_moves,
)
from purlin_core.spec import Spec
from tests.core.operands import Lengths, operand


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
