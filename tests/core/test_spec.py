"""The language (what parses, what is refused and how) and its meaning (hand-written outputs, laws, reductions bit by bit)."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from purlin_core.errors import DtypeError, ShapeError, SpecError
from purlin_core.reference import ACCUMULATOR, reduce
from purlin_core.spec import Dim, Layout, Segment, Sizes, Spec, check_sizes

# The language


def test_a_spec_is_read_as_written() -> None:
    spec = Spec.parse("b (text@ image@) h -> b (text image@~2:1) h")
    text, image = Segment("text", sharded=True), Segment("image", sharded=True)
    b, h = Dim((Segment("b"),)), Dim((Segment("h"),))
    assert spec.left == Layout((b, Dim((text, image)), h))
    assert spec.right == Layout((b, Dim((Segment("text"), Segment("image", True, 2, 1))), h))
    assert not spec.partial
    assert Spec.parse("+n -> n@").partial


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("n@->n", "n@ -> n"),
        ("  + n\t->  n@ ", "+n -> n@"),
        ("( text@ image@ )h->(text image)h@", "(text@ image@) h -> (text image) h@"),
        ("(n)@ -> n", None),
        ("(n@) -> (n)", "n@ -> n"),
        ("y@ -> y@~1:1", "y@ -> y@~1"),
        ("y@ -> y@~0", "y@ -> y@"),
        ("y@ -> y@~0:3", "y@ -> y@~0:3"),
        ("y@ -> y@~3:0", "y@ -> y@~3:0"),
    ],
)
def test_equal_specs_have_one_text(text: str, canonical: str | None) -> None:
    if canonical is None:
        with pytest.raises(SpecError):
            Spec.parse(text)
    else:
        assert str(Spec.parse(text)) == canonical
        assert Spec.parse(canonical) == Spec.parse(text)


def test_parsing_is_cached() -> None:
    assert Spec.parse("s@ h -> s h@") is Spec.parse("s@ h -> s h@")


names = st.lists(st.sampled_from(["a", "b", "c_1", "Text", "_x"]), min_size=1, max_size=5, unique=True)


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Two sides that make a spec: some dims of segments, one sharded dim a side, dims and segments permuted."""
    pool = draw(names)
    cuts = sorted(draw(st.sets(st.integers(1, len(pool)), max_size=3)) | {0, len(pool)})
    groups = [pool[lo:hi] for lo, hi in pairwise(cuts)]
    kept = draw(st.sampled_from(groups))

    def side(order: list[list[str]], sharded: set[str], rows: tuple[int, int]) -> Layout:
        return Layout(
            tuple(Dim(tuple(Segment(n, n in sharded, *(rows if n in sharded else (0, 0))) for n in g)) for g in order)
        )

    left = draw(st.sets(st.sampled_from(kept)))
    right = draw(st.sets(st.sampled_from(sorted(left)))) if left else set(draw(st.sampled_from(groups)))
    rows = draw(st.tuples(st.integers(0, 3), st.integers(0, 3))) if left and right else (0, 0)
    order = [draw(st.permutations(group)) for group in draw(st.permutations(groups))]
    return side(groups, left, (0, 0)), side(order, right, rows)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(layout_pairs())
def test_every_spec_reads_back_from_its_text(sides: tuple[Layout, Layout]) -> None:
    spec = Spec(*sides)
    assert Spec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("n@ -> n", "all_gather"),
        ("a b@ -> b a", "all_gather"),
        ("(text@ image@) h -> (text image@) h", "all_gather"),
        ("(text@ image) -> (text image@)", "all_gather"),
        ("+n -> n@", "reduce_scatter"),
        ("+(text image) -> (text@ image)", "reduce_scatter"),
        ("+n -> n", "all_reduce"),
        ("+a b -> b a", "all_reduce"),
        ("s@ h -> s h@", "all_to_all"),
        ("b (text@ image) h -> h@ b (text image)", "all_to_all"),
        ("s@ h -> h@ s", "all_to_all"),
        ("(text@ image@) h -> h (text image@)", "all_gather"),
        ("y@ x -> y@~1 x", "halo"),
        ("y@ x -> y@~0:1 x", "halo"),
        ("n -> n", "local"),
        ("n -> n@", "local"),
        ("s@ h -> h s@", "local"),
        ("(text@ image) -> (text@ image@)", "local"),
    ],
)
def test_kind_names(text: str, kind: str) -> None:
    assert Spec.parse(text).kind_name == kind


@pytest.mark.parametrize(
    ("text", "caret", "cause", "cure"),
    [
        ("a b", 3, "a spec has two sides", "Write `left -> right`"),
        ("", 0, "a spec has two sides", "Write `left -> right`"),
        ("a -> a -> a", 7, "a second `->`", "two steps are two calls"),
        (" -> a", 1, "no dim on the left", "x.reshape(1)"),
        ("a -> ", 5, "no dim on the right", "x.reshape(1)"),
        ("a b -> a", 2, "`b` is missing on the right", "write `b` there too, or drop it here"),
        ("a -> a b", 7, "`b` is missing on the left", "write `b` there too, or drop it here"),
        ("a b a -> a b", 4, "`a` stands twice on the left", "a name of its own"),
        ("a b -> a (b a)", 12, "`a` stands twice on the right", "a name of its own"),
        ("(a b -> a b", 0, "`(` without its partner", "one pair of brackets"),
        ("a) -> a", 1, "`)` without its partner", "one pair of brackets"),
        ("((a b) c) -> (a b c)", 0, "`(` without its partner", "one pair of brackets"),
        ("a ( ) -> a", 2, "brackets around nothing", "Name the segments"),
        ("a ... -> a", 2, "cannot read `...`", "A dim is a name such as `s`"),
        ("1 a -> a", 0, "cannot read `1`", "A dim is a name such as `s`"),
        ("a -> a-b", 6, "cannot read `-b`", "A dim is a name such as `s`"),
        ("s @ -> s", 2, "cannot read `@`", "`s@` is sharded"),
        ("s@ -> s@~", 8, "cannot read `~`", "`s@~1` or `s@~1:0` has a halo"),
        ("s@ -> s@~1:", 10, "cannot read `:`", "`s@~1` or `s@~1:0` has a halo"),
        ("s@ -> s~1", 7, "cannot read `~1`", "`s@~1` or `s@~1:0` has a halo"),
        ("a -> +a", 5, "cannot read `+a`", "`+` stands once, before the left side"),
        ("++a -> a", 1, "cannot read `+a`", "`+` stands once, before the left side"),
        ("a@ b@ -> a b", 3, "`b@` shards a second dim of the left, beside `a@`", "its own mesh axis"),
        ("a b -> a@ (b@)", 11, "`b@` shards a second dim of the right, beside `a@`", "its own mesh axis"),
        ("+a b@ -> a b", 3, "`b@` is sharded, and `+` says", "Drop the `@` to reduce, the `+` to move."),
        ("a@~1 -> a@", 0, "`a@~1` has a halo on the left", "write it on the right"),
        ("a b@ -> a@~1 b", 8, "has a halo, but `a` is whole on the left", "Write `a@` on the left too"),
        ("+a -> a@~0:1", 6, "has a halo of partial results", "Reduce first"),
        (
            "(a b) c -> a (b c)",
            11,
            "`a` lies in the dim `(a b)` on the left, in `a` on the right",
            "cut or join tensors",
        ),
    ],
)
def test_an_error_shows_place_cause_and_cure(text: str, caret: int, cause: str, cure: str) -> None:
    with pytest.raises(SpecError) as caught:
        Spec.parse(text)
    said, line, mark, advice = str(caught.value).split("\n")
    assert cause in said
    assert line == "    " + text
    assert mark == "    " + " " * caret + "^"
    assert cure in advice


def test_the_caret_stays_in_place_behind_odd_whitespace() -> None:
    with pytest.raises(SpecError) as caught:
        Spec.parse("a\n\tb -> a")
    assert str(caught.value).split("\n")[1:3] == ["    a  b -> a", "       ^"]


# Lengths


def whole_and_shards(text: str, shape: tuple[int, ...], rank: int, ranks: int, sizes: Sizes) -> dict[str, object]:
    lengths = Spec.parse(text).lengths(shape, rank=rank, ranks=ranks, sizes=sizes)
    return {name: lengths.shards.get(name, whole) for name, whole in lengths.whole.items()}


@pytest.mark.parametrize(
    ("text", "shape", "sizes", "expected"),
    [
        ("n@ -> n", (4,), {}, {"n": (4, 4, 4)}),
        ("n -> n@", (6,), {}, {"n": (2, 2, 2)}),
        ("n@ -> n", (0,), {"n": [5, 0, 7]}, {"n": (5, 0, 7)}),
        ("n@ -> n", (2,), {"n": 6}, {"n": (2, 2, 2)}),
        ("s@ h -> s h@", (3, 7), {"h": [0, 3, 4]}, {"s": (3, 3, 3), "h": (0, 3, 4)}),
        ("(text image@) -> (text image)", (9,), {"text": 5}, {"text": 5, "image": (4, 4, 4)}),
        ("(text@ image@) -> (text image)", (9,), {"text": [6, 5, 0]}, {"text": (6, 5, 0), "image": (4, 4, 4)}),
        (
            "(text@ image@) -> (text image)",
            (9,),
            {"image": [1, 4, 2], "text": 15},
            {"text": (5, 5, 5), "image": (1, 4, 2)},
        ),
        ("(a b c) -> (c b a)", (9,), {"a": 1, "c": [1, 1, 1]}, {"a": 1, "b": 5, "c": 3}),
        ("+n -> n", (5,), {"n": 5}, {"n": 5}),
    ],
)
def test_lengths_follow_from_shape_and_sizes(
    text: str, shape: tuple[int, ...], sizes: Sizes, expected: dict[str, object]
) -> None:
    assert whole_and_shards(text, shape, 1, 3, sizes) == expected


@pytest.mark.parametrize(
    ("text", "shape", "sizes", "parts"),
    [
        ("b s@ -> b s", (2, 3, 4), {}, ("`x` needs 2 dims (b s@)", "shape (2, 3, 4)", "Reshape it")),
        ("n -> n@", (7,), {}, ("`x` needs `n` divisible by 3 ranks", "7 rows", "sizes={'n': [3, 2, 2]}")),
        ("n@ -> n", (2,), {"n": 7}, ("needs `n` divisible by 3 ranks", "7 rows", "sizes={'n': [3, 2, 2]}")),
        ("n@ -> n", (2,), {"n": [1, 3, 1]}, ("`x` needs 3 rows in dim 0, n@, on rank 1", "got 2", "Correct `sizes`")),
        ("n@ -> n", (4,), {"n": [1, 3, 1]}, ("`x` needs 3 rows in dim 0, n@, on rank 1", "got 4", "Correct `sizes`")),
        ("n@ -> n", (2,), {"n": [1, 2]}, ("`sizes['n']` needs a row count for each of 3 ranks", "[1, 2]", "has 0")),
        ("n@ -> n", (2,), {"n": [1, 2, -1]}, ("`sizes['n']` needs row counts of 0 or more", "[1, 2, -1]", "has 0")),
        ("n -> n", (2,), {"n": 3}, ("`x` needs 3 rows in dim 0, n, on rank 1", "got 2", "Correct `sizes`")),
        (
            "(a b@ c) -> (a b c)",
            (9,),
            {"c": 1},
            ("needs sizes for all but one segment of dim 0, (a b@ c)", "none for a and b", "sizes={'a': ...}"),
        ),
        (
            "(a b) -> (a b)",
            (2,),
            {"a": 3},
            ("needs at least 3 rows in dim 0, (a b), on rank 1", "got 2", "Correct `sizes`"),
        ),
    ],
)
def test_shape_errors_name_call_argument_need_and_cure(
    text: str, shape: tuple[int, ...], sizes: Sizes, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ShapeError) as caught:
        Spec.parse(text).lengths(shape, rank=1, ranks=3, sizes=sizes, call="exchange")
    for part in (f'exchange "{text}": ', *parts):
        assert part in str(caught.value)


def test_sizes_of_a_name_that_no_spec_has_are_refused() -> None:
    specs = [Spec.parse("text@ -> text"), Spec.parse("image@ -> image")]
    check_sizes(specs, {"text": [1, 2], "image": 4}, call="exchange")
    with pytest.raises(
        ShapeError, match=re.escape('exchange: `sizes` needs names of "text@ -> text", "image@')
    ) as caught:
        check_sizes(specs, {"txt": [1, 2]}, call="exchange")
    assert "got 'txt'" in str(caught.value)


# The meaning, by hand


def t(*rows: object) -> Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("text", "inputs", "sizes", "outputs"),
    [
        ("n@ -> n", [t(1), t(2), t(3)], None, [t(1, 2, 3)] * 3),
        ("n@ -> n", [t(1, 2), torch.tensor([]).long(), t(3)], {"n": [2, 0, 1]}, [t(1, 2, 3)] * 3),
        ("a n@ -> n a", [t([1, 2], [3, 4]), t([5, 6], [7, 8])], None, [t([1, 3], [2, 4], [5, 7], [6, 8])] * 2),
        ("+n -> n@", [t(1, 2, 3, 4), t(10, 20, 30, 40)], None, [t(11, 22), t(33, 44)]),
        ("+n -> n@", [t(1, 2, 3, 4), t(10, 20, 30, 40)], {"n": [1, 3]}, [t(11), t(22, 33, 44)]),
        ("+n -> n", [t(1, 2), t(10, 20)], None, [t(11, 22)] * 2),
        ("+(a b) -> (b@ a)", [t(1, 2, 3), t(10, 20, 30)], {"a": 1}, [t(22, 11), t(33, 11)]),
        ("s@ h -> s h@", [t([1, 2]), t([3, 4])], None, [t([1], [3]), t([2], [4])]),
        ("s@ h -> h@ s", [t([1, 2]), t([3, 4])], None, [t([1, 3]), t([2, 4])]),
        (
            "(text@ image@) h -> (text image) h@",
            [t([1, 2], [3, 4]), t([5, 6])],
            {"text": [1, 0]},
            [t([1], [3], [5]), t([2], [4], [6])],
        ),
        # text is whole: every rank keeps its own
        ("(text image@) -> (text image)", [t(1, 2), t(3, 4)], {"text": 1}, [t(1, 2, 4), t(3, 2, 4)]),
        ("(text@ image@) -> (image text)", [t(1, 2), t(3, 4)], {"text": [1, 1]}, [t(2, 4, 1, 3)] * 2),
        ("n -> n@", [t(1, 2), t(3, 4)], None, [t(1), t(4)]),
        ("y@ -> y@~1", [t(1, 2), t(3, 4), t(5, 6)], None, [t(1, 2, 3), t(2, 3, 4, 5), t(4, 5, 6)]),
        ("y@ -> y@~1:0", [t(1, 2), t(3, 4), t(5, 6)], None, [t(1, 2), t(2, 3, 4), t(4, 5, 6)]),
        # a halo of two rows reaches past the neighbour that has one row, and past the one that has none
        (
            "y@ -> y@~2",
            [t(1, 2), t(3), torch.tensor([]).long(), t(4, 5)],
            {"y": [2, 1, 0, 2]},
            [t(1, 2, 3, 4), t(1, 2, 3, 4, 5), torch.tensor([]).long(), t(2, 3, 4, 5)],
        ),
        ("y@ -> y@~9", [t(1), t(2)], None, [t(1, 2)] * 2),
        ("n@ -> n", [t(1, 2)], None, [t(1, 2)]),
    ],
)
def test_the_reference_means_what_the_words_say(
    text: str, inputs: list[Tensor], sizes: Sizes | None, outputs: list[Tensor]
) -> None:
    for came, expected in zip(Spec.parse(text).reference(inputs, sizes=sizes), outputs, strict=True):
        assert came.tolist() == expected.tolist()
        assert came.shape == expected.shape


@pytest.mark.parametrize(
    ("there", "back"),
    [
        ("b (text image) h -> b (text@ image@) h", "b (text@ image@) h -> b (text image) h"),
        ("b (text@ image@) h -> h@ (image text) b", "h@ (image text) b -> b (text@ image@) h"),
        ("b (text@ image) h -> b (text image) h@", "b (text image) h@ -> b (text@ image) h"),
    ],
)
def test_there_and_back_is_where_it_was(there: str, back: str) -> None:
    sizes = {"text": [1, 0, 3], "image": [2, 2, 1], "h": [0, 4, 1]}
    whole = torch.arange(2 * 9 * 5).reshape(2, 9, 5)
    left = str(Spec.parse(there).left)
    inputs = Spec.parse(f"b (text image) h -> {left}").reference([whole] * 3, sizes=sizes)
    outputs = Spec.parse(back).reference(Spec.parse(there).reference(inputs, sizes=sizes), sizes=sizes)
    for came, expected in zip(outputs, inputs, strict=True):
        assert torch.equal(came, expected)


@pytest.mark.parametrize(
    "text",
    [
        "b c y x -> b c y x",
        "b c@ y x -> b c y x",
        "b c@ y x -> b c@~1 y x",
        "+b c y x -> b c y x",
        "+b c y x -> b c@ y x",
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_outputs_are_new_and_contiguous(text: str, ranks: int) -> None:
    inputs = [torch.ones(2, 4, 3, 2).to(memory_format=torch.channels_last) for _ in range(ranks)]
    outputs = Spec.parse(text).reference(inputs)
    assert all(out.is_contiguous() for out in outputs)
    for out in outputs:
        out.fill_(7)
    assert all(bool((x == 1).all()) for x in inputs)


def test_inputs_that_disagree_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"shapes that agree; got \(2,\), \(3,\)\. Pass `sizes`"):
        Spec.parse("n@ -> n").reference([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(DtypeError, match=r"need one dtype; got torch.float32, torch.float64"):
        Spec.parse("n@ -> n").reference([torch.zeros(2), torch.zeros(2).double()])
    with pytest.raises(ShapeError, match="`sizes` needs names of"):
        Spec.parse("n@ -> n").reference([torch.zeros(2)] * 2, sizes={"m": [2, 2]})


# Reductions, bit by bit

NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}
FLOATS = [dtype for dtype in ACCUMULATOR if dtype.is_floating_point]
INTS = [dtype for dtype in ACCUMULATOR if not dtype.is_floating_point]


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("dtype", list(NUMPY), ids=str)
def test_floats_are_reduced_one_after_the_other_and_rounded_once(dtype: torch.dtype, op: str) -> None:
    numbers = np.random.default_rng(0).normal(size=(7, 500)).astype(NUMPY[dtype]) * NUMPY[dtype](100)
    wide = np.float64 if dtype is torch.float64 else np.float32
    steps: dict[str, Callable[[Any, Any], Any]] = {"sum": np.add, "avg": np.add, "max": max, "min": min}
    expected = []
    for column in numbers.T:
        result = wide(column[0])
        for number in column[1:]:
            result = steps[op](result, wide(number))
        expected.append(NUMPY[dtype](result / wide(7) if op == "avg" else result))
    came = reduce([torch.from_numpy(row.copy()) for row in numbers], op)  # type: ignore[arg-type]
    assert came.dtype == dtype
    assert came.numpy().tobytes() == np.array(expected, NUMPY[dtype]).tobytes()


def test_half_precision_is_rounded_once() -> None:
    for dtype, big in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        big_and_ones = [torch.tensor([value], dtype=dtype) for value in (big, 1.0, 1.0)]
        assert reduce(big_and_ones, "sum").item() == big + 2  # rounded at each step it would stay at big


def test_the_order_of_ranks_is_the_order_of_additions() -> None:
    contributions = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    assert reduce(contributions, "sum").item() == 0.0
    assert reduce(contributions[::-1], "sum").item() == 0.0
    assert reduce([contributions[0], contributions[2], contributions[1]], "sum").item() == 1.0


def test_a_sum_starts_from_the_first() -> None:
    assert torch.signbit(reduce([torch.tensor([-0.0])] * 3, "sum")).item()  # 0.0 + -0.0 would be 0.0


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_ints_wrap(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    top, one = torch.tensor([info.max], dtype=dtype), torch.tensor([1], dtype=dtype)
    assert reduce([top, one], "sum").item() == info.min
    assert reduce([one, top, one], "max").item() == info.max
    assert reduce([top, one, top], "min").item() == 1


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_comes_through_and_the_earlier_zero_stays(dtype: torch.dtype, op: str) -> None:
    nan = float("nan")
    rows = [[nan, 1, 1, 0.0, -0.0], [1, nan, 2, -0.0, 0.0], [2, 2, nan, -0.0, 0.0]]
    came = reduce([torch.tensor(row, dtype=dtype) for row in rows], op)  # type: ignore[arg-type]
    assert came[:3].isnan().all()
    assert torch.signbit(came[3:]).tolist() == [False, True]


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_an_average_of_ints_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=r'op "avg" needs a floating-point `x`; got torch\.\w+\. Use "sum"'):
        reduce([torch.ones(2, dtype=dtype)] * 2, "avg")


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_move_but_are_not_reduced(dtype: torch.dtype) -> None:
    inputs = [torch.tensor([1, 0]).to(dtype), torch.tensor([0, 1]).to(dtype)]
    for came in Spec.parse("n@ -> n").reference(inputs):
        assert (
            came.to(torch.float32).tolist() == [1, 0, 0, 1]
            if not dtype.is_complex
            else came.real.tolist() == [1, 0, 0, 1]
        )
    with pytest.raises(DtypeError, match=r"needs a dtype that can be reduced \(float16, .*; got torch\.\w+\. Cast it"):
        Spec.parse("+n -> n").reference(inputs)


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(SpecError, match="`op` needs one of sum, avg, max, min; got 'mean'"):
        Spec.parse("+n -> n").reference([torch.ones(1)], op="mean")  # type: ignore[arg-type]
