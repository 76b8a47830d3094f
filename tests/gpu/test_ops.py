"""The collectives as operators on a GPU: compiled graphs hold them whole and do what eager calls do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from purlin_core import Communicator
from tests.core.test_ops import CASES, call
from tests.core.worlds import same_bits
from tests.gpu.devices import DEVICE, gpu_world, settled

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_the_operators_are_what_they_say(case: tuple[str, tuple[int, ...], list[str], list[int]]) -> None:
    with gpu_world(1) as world:
        arguments = call(world.communicators[0], "sum", torch.ones(case[1], device=DEVICE), case)
        opcheck(torch.ops.purlin.exchange.default, arguments)
        opcheck(torch.ops.purlin.exchange_into.default, [*arguments, torch.ops.purlin.exchange(*arguments)])
        settled(world)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_whole_graph_is_compiled_and_does_what_eager_does(ranks: int) -> None:
    lengths = [3, 1][:ranks]

    def step(comm: Communicator, x: Tensor) -> Sequence[Tensor]:
        x = x * 2 + 1
        gathered = comm.redistribute(x, "s@ h -> s h", sizes={"s": lengths}).sin()
        q, k = comm.exchange([x, x + 1], "s@ h -> s h@", sizes={"s": lengths})
        total = comm.all_reduce(x.new_ones(2, 4) * x.sum(), "max")
        stacked = comm.all_gather_into_tensor(x.new_zeros(ranks, 2, 4), total)
        return gathered * 3, q + 1, k, total, stacked

    def work(comm: Communicator) -> None:
        x = torch.arange(4.0 * lengths[comm.rank], device=comm.device).view(-1, 4) + comm.rank
        eager = step(comm, x)
        graph = torch.compile(lambda y: step(comm, y), backend="aot_eager", fullgraph=True, dynamic=False)
        for _ in range(2):
            for out, wanted in zip(graph(x), eager, strict=True):
                assert same_bits(out, wanted)

    with gpu_world(ranks, timeout=60) as world:
        world.run(work)
        settled(world)
