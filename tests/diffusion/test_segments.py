"""Shares of tokens sum to the whole, and cutting then joining is the identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purlin_core import ShapeError
from purlin_diffusion import Segment
from purlin_diffusion.cut import Cutter
from purlin_diffusion.entry import parse_entry
from purlin_diffusion.segments import Division, divide

RANKS = st.integers(1, 9)


@given(tokens=st.integers(0, 200), ranks=RANKS, unit=st.integers(1, 7), last_first=st.booleans())
def test_shares_are_whole_units_and_even(tokens: int, ranks: int, unit: int, last_first: bool) -> None:
    shares = divide(Segment("image", unit=unit), tokens, ranks, last_first=last_first)
    assert sum(shares) == tokens and len(shares) == ranks and min(shares) >= 0
    assert all(share % unit == 0 for share in shares[:-1])
    assert max(shares[:-1], default=0) - min(shares[:-1], default=0) <= unit


@given(tokens=st.integers(0, 40), ranks=RANKS, least=st.integers(0, 5))
def test_a_segment_stays_whole_below_its_minimum(tokens: int, ranks: int, least: int) -> None:
    division = Division([Segment("image", min=least)], ranks)
    division.measure("image", tokens)
    held = [division.local("image", rank) for rank in range(ranks)]
    if ranks > 1 and tokens // ranks < least:
        assert held == [tokens] * ranks and division.sizes(["image"]) == {"image": tokens}
    else:
        assert sum(held) == tokens
        assert ranks == 1 or min(held) >= least


def divided(ranks: int, **tokens: int) -> Division:
    division = Division([Segment(name) for name in tokens], ranks)
    for name, count in tokens.items():
        division.measure(name, count)
    return division


@given(text=st.integers(0, 9), image=st.integers(2, 20), ranks=RANKS)
def test_cut_pieces_are_the_whole_in_order(text: int, image: int, ranks: int) -> None:
    division = divided(ranks, text=text, image=image)
    x = torch.arange((text + image) * 3).reshape(1, text + image, 3)
    entry = parse_entry("b (text@ image@) c", "x")
    pieces = [Cutter(division, rank).value(entry, x, "x") for rank in range(ranks)]
    texts = [piece[:, : division.local("text", rank)] for rank, piece in enumerate(pieces)]
    images = [piece[:, division.local("text", rank) :] for rank, piece in enumerate(pieces)]
    assert torch.equal(torch.cat([*texts, *images], 1), x)


def test_what_follows_a_star_is_kept_on_every_rank() -> None:
    division = divided(2, image=4)
    x = torch.arange(7)[None, :, None]
    got = [
        Cutter(division, rank).value(parse_entry("b (image@ *) c", "x"), x, "x").flatten().tolist() for rank in (0, 1)
    ]
    assert got == [[0, 1, 4, 5, 6], [2, 3, 4, 5, 6]]


def test_local_tensors_size_one_and_other_ranks_pass() -> None:
    cutter = Cutter(divided(2, image=5), 1)
    entry = parse_entry(("b image@", "whole"), "t")
    for passes in (torch.zeros(3, 2), torch.zeros(3, 1), torch.zeros(3)):
        assert cutter.value(entry, passes, "t") is passes
    assert cutter.value(entry, torch.zeros(3, 5), "t").shape == (3, 2)


def test_nests_are_cut_leaf_by_leaf() -> None:
    cutter = Cutter(divided(2, image=5), 0)
    nest: Any = {"a": [torch.zeros(1, 5, 2), (torch.zeros(1, 5, 3), None)], "b": 7}
    cut = cutter.value(parse_entry("b image@ c", "x"), nest, "x")
    assert (
        cut["a"][0].shape == (1, 3, 2)
        and cut["a"][1][0].shape == (1, 3, 3)
        and cut["a"][1][1] is None
        and cut["b"] == 7
    )


@pytest.mark.parametrize("shape", [(1, 4, 2), (1, 6, 2), (5, 2)])
def test_a_tensor_that_is_neither_whole_nor_local_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="`residuals` needs"):
        Cutter(divided(2, image=5), 0).value(parse_entry("b image@ c", "x"), torch.zeros(shape), "`residuals`")


def test_tokens_that_have_not_entered_are_named() -> None:
    with pytest.raises(ShapeError, match=r"`image`.*enter"):
        Division([Segment("image")], 2).total("image")
