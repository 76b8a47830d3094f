"""Every collective does what its spec means, in every regime: copies to the bit, sums the same bits on all ranks and in all regimes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator, LocalWorld
from tests.core.cases import COPIES, COPY_DTYPES, REDUCTIONS, Case, copy_case, sum_case
from tests.core.worlds import REGIMES, bytes_of, random_tensor, regimes_of, same_bits, same_values, spread, world_of

WORLDS = range(1, 9)


def outputs(world: LocalWorld, cases: Sequence[Case], *, granted: bool) -> list[list[Tensor]]:
    """[case][rank]: each case twice, into a new tensor and into one that is given (spread out, or granted); both must be the same."""

    def work(comm: Communicator) -> list[Tensor]:
        return [_both(comm, case, granted=granted) for case in cases]

    return [list(ranks) for ranks in zip(*world.run(work), strict=True)]


def _both(comm: Communicator, case: Case, *, granted: bool) -> Tensor:
    x, expected = case.inputs[comm.rank], case.expected[comm.rank]
    made = comm.redistribute(x, case.spec, sizes=case.sizes, op=case.op)
    out = comm.empty(expected.shape, expected.dtype) if granted else spread(torch.zeros_like(expected))
    given = comm.redistribute(x, case.spec, sizes=case.sizes, op=case.op, out=out)
    assert given is out
    assert same_bits(made, given), str(case)
    return made


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_copies_are_bitwise_what_the_spec_means(ranks: int, regime: str) -> None:
    random = Random(ranks)
    cases = [copy_case(spec, ranks, random) for spec in COPIES * 2]
    with world_of(ranks, regime, teams=random.choice((1, 2, 3))) as world:
        for case, outs in zip(cases, outputs(world, cases, granted=regime == "direct"), strict=True):
            assert all(map(same_bits, outs, case.expected)), str(case)
        assert ranks == 1 or regime in regimes_of(world)


@pytest.mark.parametrize("ranks", WORLDS)
def test_sums_are_what_the_spec_means_and_the_same_bits_in_all_regimes(ranks: int) -> None:
    random = Random(100 + ranks)
    cases = [sum_case(spec, ranks, random) for spec in REDUCTIONS * 4]
    ways = [("packet", 1), ("packet", 3), ("staged", 1), ("staged", 2), ("direct", 1)]
    results = []
    for regime, teams in ways:
        with world_of(ranks, regime, teams=teams) as world:
            results.append(outputs(world, cases, granted=regime == "direct"))
            assert ranks == 1 or ("packet" if regime == "packet" else "staged") in regimes_of(world)
    for case, *outs in zip(cases, *results, strict=True):
        assert all(map(same_values, outs[0], case.expected)), str(case)
        for other in outs[1:]:
            assert all(map(same_bits, outs[0], other)), str(case)
        if case.spec.endswith(("-> n", "c a b")):
            assert all(same_bits(out, outs[0][0]) for out in outs[0]), f"ranks differ: {case}"


@pytest.mark.parametrize("regime", REGIMES)
def test_calls_that_move_nothing_do_nothing_and_are_counted(regime: str) -> None:
    def work(comm: Communicator) -> None:
        for spec, shape in (
            ("n@ -> n", (0,)),
            ("s@ h -> s h@", (0, 3)),
            ("+n -> n", (0,)),
            ("+n -> n@", (0,)),
            ("y@ x -> y@~2 x", (2, 0)),
        ):
            out = comm.redistribute(torch.ones(shape), spec)
            assert out.numel() == 0
        assert comm.all_reduce(torch.ones(0, 4)).shape == (0, 4)
        assert comm.stats().calls == 6 and comm.stats().received_bytes == 0
        assert comm.redistribute(torch.ones(1), "+n -> n").item() == comm.ranks

    with world_of(3, regime) as world:
        world.run(work)


@pytest.mark.parametrize("dtype", COPY_DTYPES)
def test_any_dtype_is_copied_to_the_bit(dtype: torch.dtype) -> None:
    xs = [random_tensor((4, 6), dtype, rank) for rank in range(2)]
    with world_of(2) as world:
        for rank, (whole, turned) in enumerate(
            world.run(
                lambda c: (c.redistribute(xs[c.rank], "a@ b -> a b"), c.redistribute(xs[c.rank].T, "b a@ -> a b@"))
            )
        ):
            assert torch.equal(bytes_of(whole), torch.cat([bytes_of(x) for x in xs]))
            assert same_bits(turned, torch.cat([x[:, 3 * rank : 3 * rank + 3] for x in xs]))
