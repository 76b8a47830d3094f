"""What attention does with keys, layer after layer, where one rank reads them late; and a carrier that asks no leave to overwrite them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from purlin_core import Communicator, LocalWorld
from purlin_diffusion import Segment
from purlin_diffusion.compiled import Sharding, current, exchange, running
from purlin_diffusion.segments import Division
from tests.core.worlds import same_bits

RANKS, LAYERS, TOKENS = 2, 5, 7
SLOW = 1
DELAY = 0.004  # seconds of a thread
LONG = 8_000_000  # cycles of a GPU's stream: some 4 ms


@torch.library.custom_op("purlin_test::reads_late", mutates_args=())
def reads_late(x: Tensor, rank: int) -> Tensor:
    if rank == SLOW:
        torch.cuda._sleep(LONG) if x.is_cuda else time.sleep(DELAY)
    return x.clone()


@reads_late.register_fake
def _(x: Tensor, rank: int) -> Tensor:
    return torch.empty_like(x)


class Careless:
    """One buffer a rank, into which peers write when they like: what has come is waited for, whether it has been read is not asked."""

    def __init__(self, rank: int, buffers: list[Tensor], came: Barrier, marks: list[Any]) -> None:
        self.rank, self.ranks = rank, len(buffers)
        self._buffers, self._came, self._marks = buffers, came, marks

    @staticmethod
    def of_all(device: str) -> Callable[[Communicator], Careless]:
        buffers = [torch.zeros(TOKENS, 3, dtype=torch.float64, device=device) for _ in range(RANKS)]
        came, marks = Barrier(RANKS), [None] * RANKS
        return lambda comm: Careless(comm.rank, buffers, came, marks)

    def exchange(self, tensors: list[Tensor], _: Any, *, sizes: Any) -> list[Tensor]:
        rows = sizes["n"]
        first = sum(rows[: self.rank])
        for buffer in self._buffers:
            buffer[first : first + rows[self.rank]] = tensors[0]
        if tensors[0].is_cuda:
            self._marks[self.rank] = torch.cuda.current_stream().record_event()
        self._came.wait(20)
        for mark in filter(None, self._marks):
            mark.wait()
        self._came.wait(20)
        return [self._buffers[self.rank]]


def layers(x: Tensor, own: Sharding) -> Tensor:
    """Gather keys, read them, make the next."""
    sharding = current(own)
    division, rank = sharding.division, sharding.carrier.rank
    first, mine = division.first("n", rank), division.local("n", rank)
    for layer in range(LAYERS):
        (keys,) = exchange(sharding.carrier, [x], ["n@ d -> n d"], division.sizes(["n"]))
        x = reads_late(keys, rank).narrow(0, first, mine) * 2 + layer + keys.sum(0)
    return x


def expected(x: Tensor) -> Tensor:
    for layer in range(LAYERS):
        x = x * 2 + layer + x.sum(0)
    return x


def outputs(
    worlds: Callable[[], AbstractContextManager[LocalWorld]],
    carrier_of: Callable[[Communicator], Any],
    how: str,
    calls: int,
) -> list[list[Tensor]]:
    """By rank, what each call returned, on the CPU. `how`: eager, or torch.compile's backend."""
    torch._dynamo.reset()

    def work(comm: Communicator) -> list[Tensor]:
        division = Division([Segment("n")], RANKS)
        division.measure("n", TOKENS)
        sharding = Sharding(carrier_of(comm), division, "gather_kv")
        run = layers if how == "eager" else torch.compile(layers, backend=how, fullgraph=True)
        got = []
        with running(sharding), torch.no_grad():
            for turn in range(calls):
                first, mine = division.first("n", comm.rank), division.local("n", comm.rank)
                x = value(turn).narrow(0, first, mine).to(comm.device, copy=True)
                got.append(run(x, sharding).clone())
        return [x.cpu() for x in got]

    with worlds() as world:
        return world.run(work)


def value(turn: int) -> Tensor:
    """Whole numbers, of which sums are exact in any order."""
    return (torch.arange(TOKENS * 3.0).view(TOKENS, 3) + 5 * turn).double()


def wrong(got: list[list[Tensor]]) -> int:
    """Calls after which the ranks' shares are not together what one rank computes."""
    return sum(
        not same_bits(torch.cat(shares), expected(value(turn))) for turn, shares in enumerate(zip(*got, strict=True))
    )
