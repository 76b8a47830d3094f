"""The collectives under torch's names, against the obvious: torch.cat, slices, sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator
from purlin_core.reference import reduce
from purlin_core.spec import Op
from tests.core.cases import SUM_DTYPES, numbers
from tests.core.worlds import random_tensor, same_bits, same_values, spread, world_of

WORLDS = range(1, 9)
REGIMES = ("packet", "staged")


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("regime", [*REGIMES, "direct"])
def test_all_gather_takes_both_of_torchs_shapes(ranks: int, regime: str) -> None:
    shards = [random_tensor((3, 5), torch.float32, seed) for seed in range(ranks)]

    def work(comm: Communicator) -> list[Tensor]:
        make = comm.empty if regime == "direct" else torch.empty
        outs = [make((3 * ranks, 5)), make((ranks, 3, 5))]
        for out in outs:
            assert comm.all_gather_into_tensor(out, shards[comm.rank]) is out
            assert comm.all_gather_into_tensor(out, spread(shards[comm.rank])) is out
        return outs

    with world_of(ranks, regime) as world:
        for joined, stacked in world.run(work):
            assert same_bits(joined, torch.cat(shards)) and same_bits(stacked, torch.stack(shards))


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_reduce_scatter_and_all_reduce_are_the_reduction_in_rank_order(ranks: int, regime: str, op: Op) -> None:
    for dtype in SUM_DTYPES:
        if op == "avg" and not dtype.is_floating_point:
            continue
        xs = [numbers((2 * ranks, 7), dtype, 31 * rank + ranks) for rank in range(ranks)]
        total = reduce(xs, op)

        def work(
            comm: Communicator, dtype: torch.dtype = dtype, xs: list[Tensor] = xs
        ) -> tuple[Tensor, Tensor, Tensor]:
            part = torch.zeros((2, 7), dtype=dtype)
            assert comm.reduce_scatter_tensor(part, spread(xs[comm.rank]), op) is part
            whole, one = spread(xs[comm.rank]), xs[comm.rank][0, 0].clone()
            assert comm.all_reduce(whole, op) is whole and comm.all_reduce(one, op) is one
            return part, whole, one

        with world_of(ranks, regime) as world:
            results = world.run(work)
        assert same_values(torch.cat([part for part, _, _ in results]), total)
        assert all(same_values(whole, total) and same_values(one, total[0, 0]) for _, whole, one in results)
        assert all(same_bits(whole, results[0][1]) for _, whole, _ in results)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("regime", [*REGIMES, "direct"])
def test_all_to_all_of_equal_shares_is_a_transpose_of_blocks(ranks: int, regime: str) -> None:
    xs = [random_tensor((2 * ranks, 3), torch.int16, seed) for seed in range(ranks)]

    def work(comm: Communicator) -> Tensor:
        out = (
            comm.empty((2 * ranks, 3), torch.int16)
            if regime == "direct"
            else spread(torch.zeros(2 * ranks, 3, dtype=torch.int16))
        )
        assert comm.all_to_all_single(out, spread(xs[comm.rank])) is out
        again = torch.zeros(2 * ranks, 3, dtype=torch.int16)
        comm.all_to_all_single(again, xs[comm.rank], [2] * ranks, [2] * ranks)
        assert same_bits(out, again)
        return out

    with world_of(ranks, regime) as world:
        for rank, out in enumerate(world.run(work)):
            assert same_bits(out, torch.cat([x[2 * rank : 2 * rank + 2] for x in xs]))


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("regime", [*REGIMES, "direct"])
def test_all_to_all_of_any_sizes_moves_the_rows_its_matrix_says(ranks: int, regime: str) -> None:
    random = Random(ranks)
    matrices = [[[random.choice((0, 0, 1, 3, 40)) for _ in range(ranks)] for _ in range(ranks)] for _ in range(6)]
    matrices.append([[0] * ranks for _ in range(ranks)])
    xs = [
        [random_tensor((sum(row), 3), torch.float16, 7 * k + r) for r, row in enumerate(m)]
        for k, m in enumerate(matrices)
    ]

    def work(comm: Communicator) -> list[Tensor]:
        outs = []
        for matrix, x in zip(matrices, xs, strict=True):
            column = [row[comm.rank] for row in matrix]
            out = torch.zeros(sum(column), 3, dtype=torch.float16)
            if regime == "direct":
                out = comm.empty(out.shape, out.dtype)
            comm.all_to_all_single(out, spread(x[comm.rank]), column, matrix[comm.rank])
            outs.append(out.clone())
        return outs

    with world_of(ranks, regime) as world:
        results = world.run(work)
    for k, matrix in enumerate(matrices):
        for rank in range(ranks):
            pieces = [_rows(x, row, rank) for x, row in zip(xs[k], matrix, strict=True)]
            assert same_bits(results[rank][k], torch.cat(pieces)), matrix


def _rows(x: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
    """The rows of x that go to `rank`."""
    first = [0, *accumulate(sizes)][rank]
    return x[first : first + sizes[rank]]


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_uneven_shards_of_all_gather_and_reduce_scatter(ranks: int, regime: str) -> None:
    random = Random(ranks)
    sizes = [random.choice((0, 1, 2, 6)) for _ in range(ranks)]
    rows = sum(sizes)
    shards = [random_tensor((size, 4), torch.int32, seed) for seed, size in enumerate(sizes)]
    wholes = [random_tensor((rows, 4), torch.int32, 50 + seed) for seed in range(ranks)]

    def work(comm: Communicator) -> tuple[Tensor, Tensor]:
        gathered = torch.zeros(rows, 4, dtype=torch.int32)
        part = torch.zeros(sizes[comm.rank], 4, dtype=torch.int32)
        comm.all_gather_into_tensor(gathered, shards[comm.rank], sizes=sizes)
        comm.reduce_scatter_tensor(part, wholes[comm.rank], sizes=sizes)
        return gathered, part

    with world_of(ranks, regime) as world:
        results = world.run(work)
    assert all(same_bits(gathered, torch.cat(shards)) for gathered, _ in results)
    assert same_bits(torch.cat([part for _, part in results]), reduce(wholes, "sum"))


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("rows", [1, (2, 0), (0, 3), (4, 5)])
def test_halo_gives_rows_of_the_neighbours(ranks: int, dim: int, rows: int | tuple[int, int]) -> None:
    """Shards of 0, 1 and 2 rows: a halo reaches past a short neighbour, and ends at the edges of the whole."""
    sizes = [(2, 1, 0, 2)[rank % 4] for rank in range(ranks)]
    before, after = (rows, rows) if isinstance(rows, int) else rows
    whole = random_tensor((3, 3, 3), torch.float64, ranks).narrow(dim, 0, 1).repeat_interleave(sum(sizes), dim)
    whole = whole + torch.arange(sum(sizes)).view([-1 if i == dim % 3 else 1 for i in range(3)])
    shards = whole.split(sizes, dim)

    with world_of(ranks, "packet") as world:
        outs = world.run(lambda comm: comm.halo(shards[comm.rank], dim, rows, sizes=sizes))
    for rank, out in enumerate(outs):
        lo = sum(sizes[:rank])
        hi = lo + sizes[rank]
        lo, hi = (max(0, lo - before), min(sum(sizes), hi + after)) if sizes[rank] else (lo, lo)
        assert same_bits(out, whole.narrow(dim, lo, hi - lo))


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("regime", [*REGIMES, "direct"])
def test_an_exchange_of_a_list_is_the_exchange_of_each(ranks: int, regime: str) -> None:
    """Tensors of other dtypes and specs in one call; the names they share have the same sizes."""
    random = Random(ranks)
    s, h = ([random.choice((0, 1, 4)) for _ in range(ranks)] for _ in range(2))
    specs = ["s@ h -> s h@", "s@ -> s", "b s@ -> s b", "h@ s -> h s@"]
    dtypes = [torch.float32, torch.uint8, torch.bfloat16, torch.complex64]

    def tensors(rank: int) -> list[Tensor]:
        shapes = [(s[rank], sum(h)), (s[rank],), (2, s[rank]), (h[rank], sum(s))]
        return [
            random_tensor(shape, dtype, 9 * rank + i)
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]

    def work(comm: Communicator) -> None:
        xs, sizes = tensors(comm.rank), {"s": s, "h": h}
        single = [
            comm.redistribute(x, spec, sizes={name: rows for name, rows in sizes.items() if name in spec})
            for x, spec in zip(xs, specs, strict=True)
        ]
        together = comm.exchange(xs, specs, sizes=sizes)
        assert all(map(same_bits, together, single))
        if regime == "direct":
            outs = [comm.empty(x.shape, x.dtype) for x in single]
            assert all(map(same_bits, comm.exchange(xs, specs, sizes=sizes, out=outs), single))

    with world_of(ranks, regime) as world:
        world.run(work)


@pytest.mark.parametrize("regime", REGIMES)
def test_an_exchange_reduces_a_list(regime: str) -> None:
    xs = [[numbers((3, size), torch.float16, 10 * rank + size) for size in (1, 2, 30)] for rank in range(3)]
    with world_of(3, regime, teams=2) as world:
        outs = world.run(
            lambda comm: comm.exchange(xs[comm.rank], ["+a b -> a b", "+a b -> b a", "+a c -> a c"], op="avg")
        )
    means = [reduce([x[i] for x in xs], "avg") for i in range(3)]
    means[1] = means[1].T.contiguous()
    assert all(same_values(out, mean) for rank in outs for out, mean in zip(rank, means, strict=True))


@pytest.mark.parametrize("ranks", WORLDS)
def test_barrier_holds_everyone_back_until_the_last_has_come(ranks: int) -> None:
    here = [0] * ranks

    def work(comm: Communicator) -> None:
        for turn in range(1, 30):
            here[comm.rank] = turn
            comm.barrier()
            assert min(here) >= turn
            comm.barrier()

    with world_of(ranks) as world:
        world.run(work)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("regime", [*REGIMES, "direct"])
def test_in_place_is_allowed_in_three_forms(ranks: int, regime: str) -> None:
    shards = [random_tensor((11,), torch.int64, seed) for seed in range(ranks)]
    wholes = [random_tensor((11 * ranks,), torch.int64, 70 + seed) for seed in range(ranks)]
    total = reduce(wholes, "sum")

    def work(comm: Communicator) -> None:
        mine = slice(11 * comm.rank, 11 * (comm.rank + 1))
        gathered = (
            comm.empty((11 * ranks,), torch.int64) if regime == "direct" else torch.zeros(11 * ranks, dtype=torch.int64)
        )
        for _ in range(2):
            gathered.zero_()
            gathered[mine] = shards[comm.rank]
            comm.all_gather_into_tensor(gathered, gathered[mine])
            assert same_bits(gathered, torch.cat(shards))
            x = wholes[comm.rank].clone()
            comm.reduce_scatter_tensor(x[mine], x)
            assert same_bits(x[mine], total[mine])
            y, z = wholes[comm.rank].clone(), wholes[comm.rank].clone()
            comm.all_reduce(y)
            comm.redistribute(z, "+n -> n", out=z)
            assert same_bits(y, total) and same_bits(z, total)

    with world_of(ranks, regime) as world:
        world.run(work)
