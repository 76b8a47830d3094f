"""Sums against exact arithmetic: rounded once from a wide sum; NaN wins; integers wrap; and the same bits however the call runs."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from purlin_core import prepare
from purlin_core.plan import AllReduce
from purlin_core.spec import Op
from tests.core.worlds import same_bits, world_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
SIZE = 70


def reduced(xs: list[Tensor], op: Op, regime: str, spec: str = "+n -> n") -> Tensor:
    """The result of all ranks, checked to be the same bits on each."""
    with world_of(len(xs), regime, teams=2) as world:
        outs = world.run(lambda comm: comm.redistribute(xs[comm.rank], spec, op=op))
    if spec == "+n -> n@":
        return torch.cat(outs)
    assert all(same_bits(out, outs[0]) for out in outs)
    return outs[0]


def summands(ranks: int, dtype: torch.dtype) -> list[Tensor]:
    """Of many magnitudes and both signs, so that sums cancel and the order shows."""
    generator = torch.Generator().manual_seed(ranks)
    wide = torch.randn(ranks, SIZE, generator=generator, dtype=torch.float64)
    wide *= torch.exp2(torch.randint(-8, 8, (ranks, SIZE), generator=generator))
    return [x.to(dtype) for x in wide]


def exact_sum(xs: list[Tensor], i: int) -> Fraction:
    return sum((Fraction(x[i].item()) for x in xs), Fraction(0))


@pytest.mark.parametrize("regime", ["packet", "staged"])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_sum_is_within_one_rounding_of_the_wide_sum(ranks: int, dtype: torch.dtype, op: Op, regime: str) -> None:
    """|result - exact| <= half a unit in the last place of the dtype, and what ranks - 1 additions (and a division) in the wide dtype can lose."""
    xs = summands(ranks, dtype)
    wide_unit = 2.0**-53 if dtype is torch.float64 else 2.0**-24
    out = reduced(xs, op, regime)
    for i in range(SIZE):
        exact = exact_sum(xs, i)
        wide = ranks * wide_unit * sum(abs(x[i].item()) for x in xs)
        if op == "avg":
            exact, wide = exact / ranks, wide / ranks + wide_unit * abs(float(exact))
        rounding = max(
            torch.finfo(dtype).eps / 2 * abs(float(exact)), torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        )
        assert abs(Fraction(out[i].item()) - exact) <= Fraction(rounding) + Fraction(wide), (i, out[i], float(exact))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accumulated_wide(dtype: torch.dtype) -> None:
    """One large and many small summands: rounded at each step, the small ones would all be lost."""
    xs = [torch.full((SIZE,), 256.0 if rank == 0 else 0.5, dtype=dtype) for rank in range(8)]
    exact = 256 + 7 * 0.5
    assert (xs[0] + xs[1])[0] == 256 or dtype is torch.float16
    for regime in ("packet", "staged"):
        assert same_bits(reduced(xs, "sum", regime), torch.full((SIZE,), exact).to(dtype))


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("regime", ["packet", "staged"])
def test_integers_wrap(dtype: torch.dtype, regime: str) -> None:
    info = torch.iinfo(dtype)
    span = info.max - info.min + 1
    xs = [torch.tensor([info.max, info.min, 3, info.max // 2] * 20, dtype=dtype) for _ in range(3)]
    wanted = [(sum(int(x[i]) for x in xs) - info.min) % span + info.min for i in range(80)]
    for spec in ("+n -> n", "+n -> n@"):
        sizes = reduced([torch.cat([x, x[:1]]) for x in xs], "sum", regime, spec)
        assert sizes.tolist() == [*wanted, wanted[0]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("regime", ["packet", "staged"])
def test_one_nan_wins_wherever_it_comes_from(dtype: torch.dtype, op: Op, where: int, regime: str) -> None:
    xs = [torch.arange(SIZE).to(dtype) * (-1) ** rank for rank in range(3)]
    xs[where][::3] = float("nan")
    xs[(where + 1) % 3][1] = float("inf")
    nan = reduced(xs, op, regime).isnan()
    assert nan[::3].all() and not nan[1::3].any() and not nan[2::3].any()


def all_reduced(xs: list[Tensor], *, in_place: bool) -> tuple[list[Tensor], int]:
    """The results of the third of three calls through rings, and the bytes that all ranks sent in a call."""
    calls = 3
    mine = [x.clone() for x in xs]
    outs = mine if in_place else [torch.empty_like(x) for x in xs]
    with world_of(len(xs), "staged", teams=2, slots=2) as world:
        for _ in range(calls):
            for x, kept in zip(mine, xs, strict=True):
                x.copy_(kept)
            world.run(lambda comm: comm.redistribute(mine[comm.rank], "+n -> n", out=outs[comm.rank]))
        sent = sum(comm.stats().sent_bytes for comm in world.communicators)
    return outs, sent // calls


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_through_rings_one_exchange_and_two_give_the_same_bits(
    ranks: int, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    xs = [x.repeat(40)[:-1] for x in summands(ranks, torch.bfloat16)]
    joined, two_sent = all_reduced(xs, in_place=in_place)
    monkeypatch.setattr(prepare, "how_all_reduce", lambda *_: AllReduce.ONE_SHOT)
    exchanged, one_sent = all_reduced(xs, in_place=in_place)
    assert one_sent == ranks * (ranks - 1) * xs[0].nbytes and two_sent == 2 * (ranks - 1) * xs[0].nbytes
    assert all(same_bits(out, joined[0]) for out in [*exchanged, *joined])


def test_max_and_min_are_exact_and_infinities_add_up() -> None:
    xs = [torch.tensor([1.5, -math.inf, math.inf, -0.0, 7.0]) + rank for rank in range(3)]
    assert reduced(xs, "max", "packet").tolist() == [3.5, -math.inf, math.inf, 2.0, 9.0]
    assert reduced(xs, "min", "packet").tolist() == [1.5, -math.inf, math.inf, 0.0, 7.0]
    assert reduced(xs, "sum", "packet").tolist() == [7.5, -math.inf, math.inf, 3.0, 24.0]
