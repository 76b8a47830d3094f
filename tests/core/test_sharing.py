"""Inputs and outputs that share storage: three forms are allowed, any other overlap is found by the byte and refused."""

from __future__ import annotations

import re
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from purlin_core.alias import Memory, check_alias
from purlin_core.errors import AliasError
from purlin_core.plan import (
    AllReduce,
    Operand,
    all_to_all_moves,
    freeze_sizes,
    plan_moves,
)
from purlin_core.spec import Spec
from tests.core.operands import Lengths, operand
from tests.core.placed import Placed, World, unpack


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
