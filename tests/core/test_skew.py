"""Calls that all ranks make alike never fail, however the ranks drift against each other, and each is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator
from tests.core.worlds import REGIMES, same_bits, scratch_for, world_of

CALLS = 700


def value(turn: int, rank: int, size: int) -> Tensor:
    return torch.arange(size, dtype=torch.int32) * 31 + turn * 1009 + rank * 17


def gather(comm: Communicator, turn: int, size: int) -> None:
    wanted = torch.cat([value(turn, r, size) for r in range(comm.ranks)])
    assert same_bits(comm.redistribute(value(turn, comm.rank, size), "n@ -> n"), wanted)


def gather_granted(comm: Communicator, turn: int, size: int) -> None:
    out = comm.empty((comm.ranks * size,), torch.int32)
    comm.all_gather_into_tensor(out, value(turn, comm.rank, size))
    assert same_bits(out, torch.cat([value(turn, r, size) for r in range(comm.ranks)]))


def total(comm: Communicator, turn: int, size: int) -> None:
    x = value(turn, comm.rank, size)
    comm.all_reduce(x)
    wanted = torch.stack([value(turn, r, size) for r in range(comm.ranks)]).sum(0, dtype=torch.int32)
    assert same_bits(x, wanted)


def total_granted(comm: Communicator, turn: int, size: int) -> None:
    """In place on some ranks, from another tensor on others."""
    x, out = value(turn, comm.rank, size), comm.empty((size,), torch.int32)
    if (turn + comm.rank) % 3 == 0:
        x = out.copy_(x)
    comm.redistribute(x, "+n -> n", out=out)
    wanted = torch.stack([value(turn, r, size) for r in range(comm.ranks)]).sum(0, dtype=torch.int32)
    assert same_bits(out, wanted)


def from_one(comm: Communicator, turn: int, size: int) -> None:
    """Only the root sends: the others owe it nothing but credits, and run ahead of it or behind."""
    root = turn % comm.ranks
    sizes = {"n": [size * (r == root) for r in range(comm.ranks)]}
    x = value(turn, root, size)
    assert same_bits(comm.redistribute(x[: sizes["n"][comm.rank]], "n@ -> n", sizes=sizes), x)


def to_one(comm: Communicator, turn: int, size: int) -> None:
    root = turn % comm.ranks
    sizes = {"n": [size] * comm.ranks, "m": [2 * (r == root) for r in range(comm.ranks)]}
    x = value(turn, comm.rank, 2 * size).view(size, 2)
    out = comm.redistribute(x, "n@ m -> n m@", sizes=sizes)
    wanted = torch.cat([value(turn, r, 2 * size).view(size, 2) for r in range(comm.ranks)])
    assert same_bits(out, wanted if comm.rank == root else wanted[:, :0])


def neighbours(comm: Communicator, turn: int, size: int) -> None:
    whole = torch.cat([value(turn, r, size) for r in range(comm.ranks)])
    lo, hi = max(0, comm.rank * size - 1), min(len(whole), comm.rank * size + size + 2)
    assert same_bits(comm.halo(value(turn, comm.rank, size), 0, (1, 2)), whole[lo:hi])


KINDS: tuple[Callable[[Communicator, int, int], None], ...] = (
    gather,
    gather_granted,
    total_granted,
    total,
    from_one,
    to_one,
    neighbours,
)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("regime", [*REGIMES, "mixed"])
@pytest.mark.parametrize("slots", [1, 4])
def test_agreeing_calls_never_raise_whatever_the_skew(ranks: int, regime: str, slots: int) -> None:
    """2000 calls and more over all parameters a world size; who sleeps, when and how long is each rank's own."""
    schedule = Random(100 * ranks + slots)
    calls = [(schedule.choice(KINDS), schedule.choice((1, 5, 40, 200))) for _ in range(CALLS // 2)]

    def work(comm: Communicator) -> None:
        mood = Random(comm.rank)
        for turn, (kind, size) in enumerate(calls):
            if mood.random() < 0.06:
                time.sleep(mood.choice((0.0, 0.0005, 0.002, 0.004)))
            kind(comm, turn, size)
        comm.check()

    scratch = scratch_for("packet" if regime == "packet" else "staged", slots=slots, teams=1 + ranks % 2)
    if regime == "mixed":
        scratch = type(scratch)(**{**vars(scratch), "packet_bytes": 64})
    with world_of(ranks, scratch=scratch, heap_bytes=1 << 14) as world:
        world.run(work)
        assert [comm.stats().calls for comm in world.communicators] == [len(calls)] * ranks


def test_more_ranks_than_cores_finish_quickly() -> None:
    def work(comm: Communicator) -> None:
        for turn in range(150):
            total(comm, turn, 5)
            gather(comm, turn, 3000)

    began = time.monotonic()
    with world_of(8) as world:
        world.run(work)
    assert time.monotonic() - began < 20


def test_a_rank_may_be_many_calls_ahead_of_a_reader_it_never_waits_for() -> None:
    """Rank 0 only sends: it runs ahead as far as the slots allow, and no further; nothing is overwritten."""

    def work(comm: Communicator) -> int:
        if comm.rank == 1:
            time.sleep(1.0)
        ahead = 0
        for turn in range(20):
            x = value(turn, 0, 30)
            out = comm.redistribute(x if comm.rank == 0 else x[:0], "n@ -> n", sizes={"n": [30, 0]})
            assert same_bits(out, x)
            if comm.rank == 0 and time.monotonic() - began < 0.9:
                ahead = turn + 1
        return ahead

    for regime, most in (("packet", 3), ("staged", 4)):
        with world_of(2, regime, slot_bytes=128) as world:
            world.run(Communicator.barrier)
            began = time.monotonic()
            assert 0 < world.run(work)[0] <= most + 1
