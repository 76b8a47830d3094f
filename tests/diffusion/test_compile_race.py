"""Keys are never overwritten while they are read, compiled or not, however late a rank reads them; and the test sees it where they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator, LocalWorld
from purlin_diffusion import Segment
from purlin_diffusion.compiled import Sharding, current, exchange, running
from purlin_diffusion.segments import Division
from tests.core.worlds import same_bits

RANKS, LAYERS, TOKENS = 2, 5, 7
SLOW = 1
DELAY = 0.004


@torch.library.custom_op("purlin_test::reads_late", mutates_args=())
def reads_late(x: Tensor, rank: int) -> Tensor:
    if rank == SLOW:
        time.sleep(DELAY)
    return x.clone()


@reads_late.register_fake
def _(x: Tensor, rank: int) -> Tensor:
    return torch.empty_like(x)


class Careless:
    """One buffer a rank, into which peers write when they like: what has come is waited for, whether it has been read is not asked."""

    def __init__(self, rank: int, buffers: list[Tensor], came: Barrier) -> None:
        self.rank, self.ranks = rank, len(buffers)
        self._buffers, self._came = buffers, came

    def exchange(self, tensors: list[Tensor], _: Any, *, sizes: Any) -> list[Tensor]:
        rows = sizes["n"]
        first = sum(rows[: self.rank])
        for buffer in self._buffers:
            buffer[first : first + rows[self.rank]] = tensors[0]
        self._came.wait(20)
        return [self._buffers[self.rank]]


def layers(x: Tensor, own: Sharding) -> Tensor:
    """What attention does with keys, layer after layer: gather them, read them, make the next."""
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


def outputs(carrier_of: Callable[[Communicator], Any], how: str, calls: int) -> list[list[Tensor]]:
    """By rank, what each call returned."""
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
                got.append(run(value(turn).narrow(0, first, mine).clone(), sharding).clone())
        return got

    with LocalWorld(RANKS, timeout=120) as world:
        return world.run(work)


def value(turn: int) -> Tensor:
    return (torch.arange(TOKENS * 3.0).view(TOKENS, 3) + 5 * turn).double()


def wrong(got: list[list[Tensor]]) -> int:
    """Calls after which the ranks' shares are not together what one rank computes."""
    return sum(
        not same_bits(torch.cat(shares), expected(value(turn))) for turn, shares in enumerate(zip(*got, strict=True))
    )


@pytest.mark.parametrize("how", ["eager", "aot_eager", "inductor"])
def test_keys_are_read_before_they_are_overwritten(how: str) -> None:
    assert wrong(outputs(lambda comm: comm, how, calls=6)) == 0


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
def test_without_a_credit_they_are_not_and_it_is_seen(how: str) -> None:
    buffers, came = [torch.zeros(TOKENS, 3, dtype=torch.float64) for _ in range(RANKS)], Barrier(RANKS)
    assert wrong(outputs(lambda comm: Careless(comm.rank, buffers, came), how, calls=6)) > 0
