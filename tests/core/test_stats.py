"""What stats() counted is what explain() says, and both are what the shapes say."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator, LocalWorld
from purlin_core.explain import formulas
from purlin_core.prepare import Prepared
from purlin_core.spec import Sizes, Spec
from tests.core.worlds import REGIMES, world_of

RANKS = 3
SHARDS = {"s": (2, 5, 1), "h": (3, 0, 4)}


@dataclass(frozen=True)
class Kind:
    """A spec on f32 tensors, and the bytes that reach `rank`, from shapes alone."""

    spec: str
    shape: tuple[str, ...]  # names; those with @ are sharded

    @property
    def sizes(self) -> Sizes:
        return {name: SHARDS[name] for name in ("s", "h") if f"{name}@" in self.spec}

    def input(self, rank: int) -> Tensor:
        return torch.zeros([SHARDS[name[0]][rank] if "@" in name else sum(SHARDS[name]) for name in self.shape])

    def received(self, rank: int, regime: str) -> int:
        out = Spec.parse(self.spec).reference([self.input(r) for r in range(RANKS)], sizes=self.sizes)[rank]
        kind = Spec.parse(self.spec).kind_name
        if kind == "local":
            return 0
        if kind == "reduce_scatter":
            return 4 * (RANKS - 1) * out.numel()
        if kind == "all_reduce":
            return 4 * (RANKS - 1) * out.numel() if regime == "packet" else _joined(4 * out.numel(), rank)
        if kind == "all_to_all":
            return 4 * (out.numel() - SHARDS["s"][rank] * SHARDS["h"][rank])
        return 4 * (out.numel() - self.input(rank).numel())


def _joined(total: int, rank: int) -> int:
    """Contributions of the others to my slice, and the slices of the others; slices are cut at lines of 16 bytes."""
    lines = -(-total // 16)
    cuts = [min(total, 16 * (r * (lines // RANKS) + min(r, lines % RANKS))) for r in range(RANKS + 1)]
    mine = cuts[rank + 1] - cuts[rank]
    return (RANKS - 1) * mine + total - mine


KINDS = [
    Kind("s@ h -> s h", ("s@", "h")),
    Kind("s@ h -> h s", ("s@", "h")),
    Kind("s@ h -> s h@", ("s@", "h")),
    Kind("s h@ -> h s@", ("s", "h@")),
    Kind("s@ -> s@~1", ("s@",)),
    Kind("s@ h -> s@~2:0 h", ("s@", "h")),
    Kind("s@ h -> s@ h", ("s@", "h")),
    Kind("s h -> s h@", ("s", "h")),
    Kind("+s h -> s@ h", ("s", "h")),
    Kind("+s h -> s h", ("s", "h")),
]


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.spec)
def test_bytes_on_the_wire_are_those_of_the_formula(kind: Kind, regime: str) -> None:
    def work(comm: Communicator) -> Prepared:
        x, before = kind.input(comm.rank), comm.stats()
        shape = comm.plan([x], kind.spec, sizes=kind.sizes).out_shapes[0]
        out = comm.empty(shape) if regime == "direct" else torch.empty(shape)
        plan = comm.plan([x], kind.spec, sizes=kind.sizes, out=[out])
        for _ in range(3):
            comm.redistribute(x, kind.spec, sizes=kind.sizes, out=out)
        after = comm.stats()
        assert after.calls - before.calls == 3
        assert after.sent_bytes - before.sent_bytes == 3 * plan.sent_bytes
        assert after.received_bytes - before.received_bytes == 3 * plan.received_bytes
        assert {plan.schedule.regime.name.lower()} == {name for name, calls in after.regimes.items() if calls}
        return plan

    with world_of(RANKS, regime, teams=2) as world:
        plans = world.run(work)
    wanted = regime if Spec.parse(kind.spec).kind_name != "local" else "packet"  # a call without messages
    for rank, plan in enumerate(plans):
        formula = sum(each.received_bytes for each in formulas(plan.operands, plan.moves))
        assert plan.received_bytes == formula == kind.received(rank, regime)
        assert f"= {formula} B" in plan.explain() or formula == 0
        assert f"receives {formula} B" in plan.explain()
        assert plan.schedule.regime.name.lower() in ({wanted, "staged"} if kind.spec.startswith("+") else {wanted})
        assert plan.explain().splitlines()[1].startswith(f"{plan.schedule.regime.name.lower()}, 2 team(s), ")
    assert sum(plan.sent_bytes for plan in plans) == sum(plan.received_bytes for plan in plans)


def test_an_exchange_of_a_list_counts_all_of_it() -> None:
    kinds = KINDS[:5]

    def work(comm: Communicator) -> int:
        comm.exchange([kind.input(comm.rank) for kind in kinds], [kind.spec for kind in kinds], sizes=SHARDS)
        return comm.stats().received_bytes

    with world_of(RANKS) as world:
        assert world.run(work) == [sum(kind.received(rank, "packet") for kind in kinds) for rank in range(RANKS)]


def test_an_all_to_all_with_sizes_counts_what_comes() -> None:
    matrix = [[1, 2, 3], [0, 5, 0], [4, 0, 7]]

    def work(comm: Communicator) -> tuple[int, int]:
        row, column = matrix[comm.rank], [row[comm.rank] for row in matrix]
        comm.all_to_all_single(torch.zeros(sum(column), 2), torch.zeros(sum(row), 2), column, row)
        return comm.stats().sent_bytes, comm.stats().received_bytes

    with world_of(RANKS) as world:
        for rank, counted in enumerate(world.run(work)):
            own, row, column = matrix[rank][rank], matrix[rank], [row[rank] for row in matrix]
            assert counted == (8 * (sum(row) - own), 8 * (sum(column) - own))


def test_stats_survive_reserve_and_count_in_place_calls() -> None:
    def work(comm: Communicator) -> None:
        comm.all_reduce(torch.ones(4))
        comm.reserve(1 << 16)
        assert comm.stats().heap_bytes == 1 << 16
        comm.all_reduce(torch.ones(4))
        out = comm.empty((8,))
        comm.all_gather_into_tensor(out, out[4 * comm.rank : 4 * comm.rank + 4])
        assert comm.stats().calls == 3 and comm.stats().received_bytes == 3 * 16

    with world_of(2) as world:
        world.run(work)


def test_explain_says_why_and_how_many_steps() -> None:
    def work(comm: Communicator) -> None:
        large, small = (comm.plan([torch.zeros(n)], "n@ -> n").explain() for n in (1 << 20, 4))
        assert "staged, 1 team(s), lag 4, 16 step(s): ordinary outputs, messages larger than packets" in large
        assert "packet, 1 team(s), lag 0, 1 step(s): no message is larger than" in small
        assert "all_gather of n: output - own shard = 8388608 - 4194304 = 4194304 B" in large
        assert comm.stats().calls == 0

    with world_of(2) as world:
        world.run(work)


@pytest.mark.parametrize("ranks", range(1, 17))
@pytest.mark.parametrize("teams", [1, 7, 16, 32])
def test_scratch_stays_within_what_was_promised(ranks: int, teams: int) -> None:
    from purlin_core._cpu import Geometry
    from purlin_core.tune import cpu_scratch, most_teams

    scratch = cpu_scratch(ranks, teams=min(teams, most_teams(ranks)))
    sizes = {name: getattr(scratch, name) for name in ("teams", "slots", "slot_bytes", "window_bytes")}
    arena = Geometry(ranks=ranks, heap_bytes=0, **sizes).arena_bytes
    assert arena <= (11 << 20 if ranks <= 2 else 44 << 20)
    assert arena >= prod((ranks - 1, scratch.teams, scratch.slots, 2, scratch.slot_bytes))


@pytest.mark.parametrize("ranks", [1, 2, 5, 16])
def test_stats_say_what_was_really_allocated(ranks: int) -> None:
    with world_of(ranks, heap_bytes=1 << 20) as world:
        for comm in world.communicators:
            stats = comm.stats()
            assert stats.heap_bytes == 1 << 20
            assert stats.scratch_bytes + stats.heap_bytes == comm._calls.tie._ending.mapped[comm.rank][0].bytes
            assert stats.scratch_bytes <= (11 << 20 if ranks <= 2 else 44 << 20)


def test_stats_survive_more_shapes_than_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purlin_core.plans.MOST_PLANS", 3)
    with LocalWorld(2) as world:

        def gather(c: Communicator) -> None:
            for rows in (1, 2, 3, 4, 5, 1, 2):
                out = c.redistribute(torch.full((rows,), float(c.rank)), "n@ -> n")
                assert out.tolist() == [0.0] * rows + [1.0] * rows

        world.run(gather)
        for communicator in world.communicators:
            assert len(communicator._calls.plans) <= 3
            stats = communicator.stats()
            assert (stats.calls, stats.sent_bytes, stats.received_bytes) == (7, 4 * 18, 4 * 18)
