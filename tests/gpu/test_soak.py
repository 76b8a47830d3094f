"""Random calls for a long time: spec, shape, dtype, layout, regime, output new, given, granted or in place, eager or replayed, ranks that dawdle.

`--soak N` makes N calls, `--soak-seed` draws others. A failure prints the call.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator, LocalWorld
from purlin_core.spec import Spec
from purlin_core.tune import Scratch
from tests.core.cases import COPIES, REDUCTIONS, Case, copy_case, sum_case
from tests.core.worlds import same_bits, same_values, spread
from tests.gpu.devices import call, captured, gpu_world, on_gpu, settled

pytestmark = pytest.mark.gpu

SCRATCH = Scratch(
    teams=3, slots=4, slot_bytes=64, window_bytes=128, packet_bytes=128
)  # small messages are packets, others staged or direct
BATCH = 40  # calls between looks


@dataclass
class Turn:
    """One call with its tensors, made before any rank waits."""

    case: Case
    how: str  # the output: new, given, granted, or in place, on some ranks at least
    xs: list[Tensor]
    outs: list[Tensor | None]
    dawdle: int  # the rank that comes late; -1: none


def turns_of(world: LocalWorld, random: Random, count: int) -> list[Turn]:
    return [_turn(world, random) for _ in range(count)]


def _turn(world: LocalWorld, random: Random) -> Turn:
    spec = random.choice(COPIES + REDUCTIONS)
    case = (sum_case if spec.startswith("+") else copy_case)(spec, world.ranks, random)
    how = random.choice(("new", "given", "granted"))
    xs = [on_gpu(x) for x in case.inputs]
    if _may_be_in_place(Spec.parse(spec)) and random.random() < 0.5:
        how = "in place"
        first = random.randrange(world.ranks)  # and the ranks behind it
        outs: list[Tensor | None] = [torch.empty_like(x) if rank >= first else None for rank, x in enumerate(xs)]
    else:
        outs = [_output(comm, case, how) for comm in world.communicators]
    return Turn(case, how, xs, outs, random.choice((-1, *range(world.ranks))))


def _may_be_in_place(spec: Spec) -> bool:
    """An all-reduce whose output has the input's dims in their order."""
    return spec.kind_name == "all_reduce" and list(spec.order) == sorted(spec.order)


def _output(comm: Communicator, case: Case, how: str) -> Tensor | None:
    wanted = case.expected[comm.rank]
    if how == "new":
        return None
    return (
        comm.empty(wanted.shape, wanted.dtype)
        if how == "granted"
        else spread(torch.zeros_like(wanted, device=comm.device))
    )


@pytest.mark.parametrize(("ranks", "way"), [(2, "fused"), (3, "fused"), (2, "streams")])
@pytest.mark.timeout(3600)
def test_random_calls(ranks: int, way: str, request: pytest.FixtureRequest) -> None:
    count, seed = request.config.getoption("--soak"), request.config.getoption("--soak-seed")
    random = Random(1000 * seed + 10 * ranks + (way == "fused"))
    with gpu_world(ranks, way, scratch=SCRATCH, heap_bytes=1 << 20, timeout=60.0) as world:
        for first in range(0, count, BATCH):
            turns = turns_of(world, random, min(BATCH, count - first))
            torch.cuda.synchronize()
            looked_at(turns, eager(world, turns), f"seed {seed}, from call {first}, eager")
            if way == "fused" and random.random() < 0.5:
                graph, results = captured(world, lambda comm, t=turns: [_made(comm, turn) for turn in t])
                for replay in range(random.choice((1, 2, 5))):
                    clear(results)
                    graph.replay()
                    looked_at(turns, results, f"seed {seed}, from call {first}, replay {replay}")
        settled(world)


def _made(comm: Communicator, turn: Turn) -> Tensor:
    x, out = turn.xs[comm.rank], turn.outs[comm.rank]
    if turn.how == "in place" and out is not None:
        x = out.copy_(x)
    return call(comm, turn.case, x, out)


def eager(world: LocalWorld, turns: list[Turn]) -> list[list[Tensor]]:
    def work(comm: Communicator) -> list[Tensor]:
        results = []
        for turn in turns:
            if turn.dawdle == comm.rank:
                time.sleep(0.0002)
            results.append(_made(comm, turn))
        return results

    return world.run(work)


def clear(results: list[list[Tensor]]) -> None:
    for out in (out for mine in results for out in mine):
        out.zero_()


def looked_at(turns: list[Turn], results: list[list[Tensor]], where: str) -> None:
    torch.cuda.synchronize()
    for k, turn in enumerate(turns):
        for rank, wanted in enumerate(turn.case.expected):
            found = results[rank][k].cpu()
            same = same_values if turn.case.spec.startswith("+") else same_bits
            assert same(found, wanted), f"{where}: rank {rank}, call {k}, {turn.how}: {turn.case}"
