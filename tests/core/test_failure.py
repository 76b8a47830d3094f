"""A rank that raises, sleeps or is used by two threads: a named error on every rank in bounded time, and a new world works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.distributed import HashStore

from purlin_core import Communicator, ConcurrentUseError, LocalWorld, PeerError, PurlinError, StallError
from purlin_core.failure import Fault, Scene, error_of
from tests.core.worlds import REGIMES, TIMEOUT, errors_of, on_threads, world_of

RANKS = 3


def gather(comm: Communicator, size: int = 300) -> torch.Tensor:
    make = comm.empty if comm.stats().heap_bytes else torch.empty
    return comm.all_gather_into_tensor(make((comm.ranks * size,)), torch.full((size,), float(comm.rank)))


@pytest.mark.parametrize("regime", REGIMES)
def test_a_rank_that_raises_inside_guard_is_named_with_its_text_within_a_second(regime: str) -> None:
    raised = [0.0]
    known: list[tuple[float, str]] = []

    def work(comm: Communicator) -> None:
        gather(comm)
        with comm.guard():
            if comm.rank == 1:
                time.sleep(0.1)
                raised[0] = time.monotonic()
                raise MemoryError("out of memory\nand a second line")
            try:
                gather(comm)
            except PeerError as error:
                known.append((time.monotonic(), str(error)))
                raise

    with world_of(RANKS, regime) as world:
        with pytest.raises(MemoryError, match="out of memory"):
            world.run(work)
        assert len(known) == RANKS - 1
        for when, text in known:
            assert when - raised[0] < 1
            assert "rank 1 left: MemoryError: out of memory." in text and "all_gather_into_tensor" in text
        for error in errors_of(world, Communicator.check):
            assert type(error) is PeerError and "rank 1 left: MemoryError" in str(error)


def test_an_exception_after_the_last_call_reaches_the_others_at_their_next() -> None:
    def work(comm: Communicator) -> None:
        gather(comm)
        if comm.rank == 0:
            raise ValueError("too late")
        time.sleep(0.1)
        comm.check()

    with world_of(2) as world, pytest.raises(ValueError, match="too late"):
        world.run(work)


def test_an_exception_that_all_ranks_raise_is_raised_as_it_is() -> None:
    def work(comm: Communicator) -> None:
        raise KeyError(comm.rank)

    with world_of(RANKS) as world, pytest.raises(KeyError):
        world.run(work)


def test_abort_says_why_on_every_rank() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 2:
            comm.abort("the user pressed stop")
        gather(comm)

    with world_of(RANKS) as world:
        for error in errors_of(world, work):
            assert type(error) is PeerError and "rank 2 left: the user pressed stop" in str(error)


@pytest.mark.parametrize("regime", REGIMES)
def test_a_rank_that_sleeps_past_the_timeout_is_named_by_all(regime: str) -> None:
    took = [0.0] * RANKS

    def work(comm: Communicator) -> None:
        gather(comm)
        if comm.rank == 1:
            time.sleep(1.0)
        began = time.monotonic()
        try:
            gather(comm)
        finally:
            took[comm.rank] = time.monotonic() - began

    with world_of(RANKS, regime, timeout=0.4) as world:
        errors = errors_of(world, work)
    for rank, error in enumerate(errors):
        assert type(error) is StallError, error
        assert "waited 0.4 s for rank 1" in str(error) and "all_gather_into_tensor" in str(error)
        assert took[rank] < 1.4
        if rank != 1:
            assert "rank 1 has not entered call #" in str(error)
    assert max(took) >= 0.4


def test_of_a_rank_that_has_left_since_it_was_waited_for_no_call_is_named() -> None:
    def work(comm: Communicator) -> None:
        time.sleep((0.0, 0.8, 1.6)[comm.rank])  # rank 0 gives up, rank 1 comes and leaves, rank 2 asks
        try:
            gather(comm)
        finally:
            if comm.rank == 1:
                comm.close()

    with world_of(RANKS, "staged", timeout=0.3) as world:
        last = errors_of(world, work)[2]
    assert type(last) is StallError and "for rank 1; rank 1 has left since." in str(last), last


@dataclass(frozen=True)
class Stalled:
    """The end of rank 0 of two, which gave up waiting for rank 1."""

    stalled: tuple[int, int, int, int, int]
    fault: tuple[int, int, int] = (int(Fault.STALL), 0, 1)
    calls: int = 7

    def post(self, rank: int) -> tuple[int, int]:
        return (7, 0)


def test_a_stall_tells_one_wait_from_another() -> None:
    """By what was waited for, on which use, of which team and chunk: Where in csrc/purlin/atom/concept.hpp."""

    def said(*stalled: int) -> str:
        what, use, step, team = stalled
        return str(error_of(Scene(0, Stalled((what, use, step, team, 1)), [], 2.5, "all_reduce", 0)))

    assert "all_reduce (call #7): rank 0 waited 2.5 s for rank 1 (a free slot, ring, team 3, chunk 4);" in said(
        0, 0, 4, 3
    )
    assert "waited 2.5 s for its own message to rank 1 to be sent (ring, team 0, chunk 2);" in said(3, 4, 2, 0)
    assert len({said(what, use, 0, 0) for what in range(3) for use in range(4)}) == 12


def test_the_deadline_is_one_of_the_whole_call() -> None:
    """Rank 1 comes late but in time, rank 2 never: rank 0 does not wait for each in turn."""

    def work(comm: Communicator) -> float:
        if comm.rank:
            time.sleep((0.7, 2.0)[comm.rank - 1])
        began = time.monotonic()
        with pytest.raises(StallError):
            gather(comm)
        return time.monotonic() - began

    with world_of(RANKS, "packet", timeout=1.0) as world:
        waited = world.run(work)
    assert 1 <= waited[0] < 1.5, waited


@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_call_that_failed_is_counted_once(before: int) -> None:
    def work(comm: Communicator) -> None:
        for _ in range(before + (comm.rank == 0)):
            comm.all_reduce(torch.ones(4))

    with world_of(2, "packet", timeout=0.2) as world:
        error = errors_of(world, work)[0]
    assert f"(call #{before + 1}): rank 0 waited" in str(error)
    assert f"rank 1 has not entered call #{before + 1}" in str(error)


def test_a_stall_says_where_it_stood() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.redistribute(torch.ones(4000), "n@ -> n", tag="here")

    with world_of(2, "staged", teams=2, timeout=0.2) as world:
        error = errors_of(world, work)[0]
    assert 'redistribute "n@ -> n" (n=4000+4000) float32 at here (call #1): rank 0 waited 0.2 s for rank 1' in str(
        error
    )
    assert "ring, team 0, chunk" in str(error) and "rank 1 has not entered call #1" in str(error)


def test_a_slow_rank_within_the_timeout_is_no_failure() -> None:
    def work(comm: Communicator) -> None:
        for turn in range(6):
            time.sleep(0.15 * (turn % RANKS == comm.rank))
            assert gather(comm)[::300].tolist() == [0.0, 1.0, 2.0]

    with world_of(RANKS, timeout=3.0) as world:
        world.run(work)


@pytest.mark.parametrize("regime", REGIMES)
def test_two_threads_in_one_communicator_are_told(regime: str) -> None:
    """The second is refused and nothing is hurt: the call of the first ends right."""
    refused = threading.Event()

    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            assert refused.wait(TIMEOUT)
            assert gather(comm)[::300].tolist() == [0.0, 1.0]
            return
        inside: list[torch.Tensor] = []
        first = threading.Thread(target=lambda: inside.append(gather(comm)))
        first.start()
        while world.communicators[1]._calls.tie.end.post(0)[0] == 0:  # the call that rank 0 last entered
            time.sleep(0.001)
        try:
            with pytest.raises(ConcurrentUseError, match="another thread is in a call of this communicator"):
                gather(comm)
        finally:
            refused.set()
        first.join(TIMEOUT)
        assert inside[0][::300].tolist() == [0.0, 1.0]

    with world_of(2, regime) as world:
        world.run(work)
        assert all(out[::300].tolist() == [0.0, 1.0] for out in world.run(gather))


def test_a_closed_rank_is_named_by_those_who_wait_for_it() -> None:
    """Peers that go on learn of a close() when they need that rank, not before, and then at once."""
    store = HashStore()

    def work(rank: int) -> str:
        comm = Communicator(store, rank=rank, ranks=2, timeout=TIMEOUT)
        comm.barrier()
        if rank == 1:
            comm.close()
            return ""
        time.sleep(0.1)
        comm.check()
        began = time.monotonic()
        with pytest.raises(PeerError) as caught:
            comm.barrier()
        assert time.monotonic() - began < 1
        comm.close()
        return str(caught.value)

    assert "rank 1 left: it closed its communicator" in on_threads(2, work)[0]


def test_a_rank_may_be_busy_elsewhere_while_another_closes() -> None:
    with LocalWorld(2, timeout=TIMEOUT) as world:
        world.run(lambda comm: (gather(comm), time.sleep(0.2 * comm.rank)))


def raises(comm: Communicator) -> None:
    with comm.guard():
        if comm.rank == 1:
            raise RuntimeError("rank 1 does not feel well")
        gather(comm)


def sleeps(comm: Communicator) -> None:
    if comm.rank == 1:
        time.sleep(0.5)
    gather(comm)


def aborts(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.abort("enough")
    gather(comm)


@pytest.mark.parametrize("fail", [raises, sleeps, aborts])
def test_a_new_communicator_of_the_same_ranks_works_after_a_failure(fail: Callable[[Communicator], None]) -> None:
    store = HashStore()

    def work(rank: int) -> list[float]:
        dead = Communicator(store, rank=rank, ranks=RANKS, timeout=0.3)
        with pytest.raises((PurlinError, RuntimeError)):
            fail(dead)
        with Communicator(store, rank=rank, ranks=RANKS, timeout=TIMEOUT) as comm:
            out = gather(comm)[::300].tolist()
        with pytest.raises(PurlinError):
            dead.check()
        with pytest.raises(PurlinError):
            gather(dead)
        dead.close()
        return out

    assert on_threads(RANKS, work) == [[0.0, 1.0, 2.0]] * RANKS


def test_a_dead_world_closes_at_once() -> None:
    began = time.monotonic()
    with world_of(4, timeout=0.1) as world:
        errors_of(world, lambda comm: comm.rank and gather(comm))
    assert time.monotonic() - began < 2
