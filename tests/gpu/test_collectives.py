"""Every collective means on a GPU what its spec means, in every regime: copies to the bit, sums the same bits as on the CPU."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator
from purlin_core.reference import reduce
from purlin_core.spec import Op
from tests.core.cases import COPIES, REDUCTIONS, SUM_DTYPES, Case, copy_case, numbers, sum_case
from tests.core.worlds import REGIMES, regimes_of, same_bits, same_values, spread, world_of
from tests.gpu.devices import DEVICE, WORLDS, gpu_world, outputs, settled

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("ranks", "way"), WORLDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_copies_are_bitwise_what_the_spec_means(ranks: int, way: str, regime: str) -> None:
    random = Random(ranks)
    cases = [copy_case(spec, ranks, random) for spec in COPIES * 2]
    with gpu_world(ranks, way, regime, teams=random.choice((1, 2, 3))) as world:
        for case, outs in zip(cases, outputs(world, cases, granted=regime == "direct"), strict=True):
            assert all(map(same_bits, outs, case.expected)), str(case)
        assert regime in regimes_of(world)


@pytest.mark.parametrize(("ranks", "way"), WORLDS)
def test_sums_are_the_same_bits_as_on_the_cpu_in_all_regimes(ranks: int, way: str) -> None:
    random = Random(100 + ranks)
    cases = [sum_case(spec, ranks, random) for spec in REDUCTIONS * 3]
    on_cpu = sums_on_the_cpu(cases, ranks)
    for regime, teams in (("packet", 1), ("packet", 3), ("staged", 1), ("staged", 2), ("direct", 1)):
        with gpu_world(ranks, way, regime, teams=teams) as world:
            results = outputs(world, cases, granted=regime == "direct")
            assert ("packet" if regime == "packet" else "staged") in regimes_of(world)
        for case, outs, wanted in zip(cases, results, on_cpu, strict=True):
            assert all(map(same_values, outs, case.expected)), f"{regime}: {case}"
            assert all(map(same_values, outs, wanted)), f"{regime}, not as on the CPU: {case}"
            if case.spec.endswith(("-> n", "c a b")):
                assert all(same_bits(out, outs[0]) for out in outs), f"{regime}, ranks differ: {case}"


def sums_on_the_cpu(cases: list[Case], ranks: int) -> list[list[Tensor]]:
    def work(comm: Communicator) -> list[Tensor]:
        return [comm.redistribute(c.inputs[comm.rank], c.spec, sizes=c.sizes, op=c.op) for c in cases]

    with world_of(ranks) as world:
        return [list(outs) for outs in zip(*world.run(work), strict=True)]


@pytest.mark.parametrize("regime", ["packet", "staged"])
@pytest.mark.parametrize("dtype", SUM_DTYPES)
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_long_sums_of_every_dtype_are_those_of_the_reference(dtype: torch.dtype, op: Op, regime: str) -> None:
    """Whole vectors, tails and several chunks a team; finite values, so bitwise."""
    if op == "avg" and not dtype.is_floating_point:
        return
    sizes = (1, 15, 16, 257, 5003)
    xs = [[numbers((n,), dtype, 3 * n + rank).nan_to_num(1, 2, -2) for n in sizes] for rank in range(3)]
    wanted = [reduce([mine[i] for mine in xs], op) for i in range(len(sizes))]
    slot_bytes = 1024
    with gpu_world(3, "fused", regime, teams=2, slot_bytes=slot_bytes) as world:
        placed = [[x.to(DEVICE) for x in mine] for mine in xs]
        for spec in ("+n -> n", "+n -> n@"):
            fitting = [i for i, n in enumerate(sizes) if spec == "+n -> n" or n % 3 == 0]
            outs = world.run(lambda c, s=spec, f=fitting: [c.redistribute(placed[c.rank][i], s, op=op) for i in f])
            settled(world)
            for k, i in enumerate(fitting):
                mine = [out[k].cpu() for out in outs]
                whole = torch.cat(mine) if spec == "+n -> n@" else mine[0]
                assert same_bits(whole, wanted[i]), (spec, sizes[i])
                assert spec == "+n -> n@" or all(same_bits(out, mine[0]) for out in mine)


@pytest.mark.parametrize(("ranks", "way"), WORLDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_torchs_names_and_the_three_forms_in_place(ranks: int, way: str, regime: str) -> None:
    xs = [torch.randint(-99, 99, (2 * ranks, 5), generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    rows = [slice(2 * rank, 2 * rank + 2) for rank in range(ranks)]

    def prepared(comm: Communicator) -> dict[str, Tensor]:
        x, mine = xs[comm.rank].to(comm.device), rows[comm.rank]
        wholes = {name: torch.zeros_like(x) for name in ("gathered", "turned", "own")}
        if regime == "direct":
            wholes = {name: comm.empty(x.shape, x.dtype) for name in wholes}
        wholes["own"][mine] = x[mine]
        others = {"x": x, "mine": x[mine].clone(), "part": torch.zeros_like(x[mine]), "spread": spread(x)}
        return wholes | others | {"stacked": x.new_zeros(ranks, 2, 5), "sum": x.clone(), "scattered": x.clone()}

    def work(comm: Communicator) -> None:
        t, mine = tensors[comm.rank], rows[comm.rank]
        comm.all_gather_into_tensor(t["gathered"], t["mine"])
        comm.all_gather_into_tensor(t["stacked"], t["mine"])
        comm.all_gather_into_tensor(t["own"], t["own"][mine])
        comm.reduce_scatter_tensor(t["part"], t["spread"])
        comm.all_reduce(t["sum"])
        comm.reduce_scatter_tensor(t["scattered"][mine], t["scattered"])
        comm.all_to_all_single(t["turned"], t["x"])
        t["halo"] = comm.halo(t["mine"], 0, (1, 2))
        comm.barrier()

    with gpu_world(ranks, way, regime, teams=2) as world:
        tensors = world.run(prepared)
        world.run(work)
        settled(world)
    whole, total = torch.cat([x[mine] for x, mine in zip(xs, rows, strict=True)]), reduce(xs, "sum")
    for rank, mine in enumerate(rows):
        t = {name: x.cpu() for name, x in tensors[rank].items()}
        assert same_bits(t["gathered"], whole) and same_bits(t["stacked"].view_as(whole), whole)
        assert same_bits(t["own"], whole) and same_bits(t["sum"], total)
        assert same_bits(t["part"], total[mine]) and same_bits(t["scattered"][mine], total[mine])
        assert same_bits(t["turned"], torch.cat([x[mine] for x in xs]))
        assert same_bits(t["halo"], whole[max(0, 2 * rank - 1) : 2 * rank + 4])


@pytest.mark.parametrize(("ranks", "way"), WORLDS)
def test_an_all_to_all_of_any_sizes_moves_the_rows_its_matrix_says(ranks: int, way: str) -> None:
    random = Random(ranks)
    matrix = [[random.choice((0, 0, 1, 3, 40)) for _ in range(ranks)] for _ in range(ranks)]
    xs = [torch.randn(sum(row), 3, generator=torch.Generator().manual_seed(r)) for r, row in enumerate(matrix)]

    with gpu_world(ranks, way, "staged") as world:
        placed = [x.to(DEVICE) for x in xs]
        outs = [torch.zeros(sum(row[d] for row in matrix), 3, device=DEVICE) for d in range(ranks)]

        def work(comm: Communicator) -> None:
            column = [row[comm.rank] for row in matrix]
            comm.all_to_all_single(outs[comm.rank], placed[comm.rank], column, matrix[comm.rank])

        world.run(work)
        settled(world)
    for rank, out in enumerate(outs):
        pieces = [x[sum(row[:rank]) :][: row[rank]] for x, row in zip(xs, matrix, strict=True)]
        assert same_bits(out.cpu(), torch.cat(pieces)), matrix


@pytest.mark.parametrize("regime", REGIMES)
def test_a_list_of_tensors_in_one_call(regime: str) -> None:
    shapes = [(3, 8), (5,), (2, 3), (4, 6)]
    specs = ["s@ h -> s h@", "n@ -> n", "b t@ -> t b", "g@ k -> k g"]
    xs = [
        [torch.randn(s, generator=torch.Generator().manual_seed(9 * r + i)) for i, s in enumerate(shapes)]
        for r in range(2)
    ]
    with gpu_world(2, "fused", regime) as world:
        placed = [[x.to(DEVICE) for x in mine] for mine in xs]
        single = world.run(lambda c: [c.redistribute(x, spec) for x, spec in zip(placed[c.rank], specs, strict=True)])

        def together(comm: Communicator) -> list[Tensor]:
            outs = [comm.empty(x.shape) for x in single[comm.rank]] if regime == "direct" else None
            return comm.exchange(placed[comm.rank], specs, out=outs)

        joined = world.run(together)
        settled(world)
    for one, other in zip(single, joined, strict=True):
        assert all(map(same_bits, one, other))


def test_the_sizes_of_design_serve_from_bytes_to_megabytes() -> None:
    """No scratch given: teams, slots and regimes as tuning chooses, from bytes to megabytes; at most 64 MiB of scratch."""
    sizes = (1, 1000, 40_000, 300_000, 5_000_001)
    xs = [[torch.randint(0, 255, (n,), dtype=torch.uint8, device=DEVICE) for n in sizes] for _ in range(2)]
    with gpu_world(2, heap_bytes=16 << 20) as world:
        fresh = world.run(lambda c: [c.redistribute(x, "n@ -> n") for x in xs[c.rank]])
        granted = world.run(
            lambda c: [c.all_gather_into_tensor(c.empty((2 * len(x),), x.dtype), x).clone() for x in xs[c.rank]]
        )
        settled(world)
        assert all(comm.stats().scratch_bytes <= 64 << 20 for comm in world.communicators)
        assert regimes_of(world) == {"packet", "staged", "direct"}
    for i in range(len(sizes)):
        whole = torch.cat([mine[i] for mine in xs])
        assert all(torch.equal(outs[i], whole) for outs in (*fresh, *granted))


@pytest.mark.parametrize("ranks", [1, 2])
def test_calls_that_move_nothing_do_nothing_and_are_counted(ranks: int) -> None:
    def work(comm: Communicator) -> None:
        for spec, shape in (("n@ -> n", (0,)), ("s@ h -> s h@", (0, 4)), ("+n -> n", (0,)), ("y@ x -> y@~2 x", (2, 0))):
            assert comm.redistribute(torch.ones(shape, device=comm.device), spec).numel() == 0
        assert comm.redistribute(torch.ones(1, device=comm.device), "+n -> n").item() == comm.ranks
        assert comm.stats().calls == 5

    with gpu_world(ranks) as world:
        world.run(work)
        settled(world)
