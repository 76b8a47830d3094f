"""A rank that raises, stays away, leaves or disagrees, on a GPU: a named error on every rank in bounded time, and the GPU can be used afterwards."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from purlin_core import Communicator, LocalWorld, MismatchError, PeerError, SetupError, StallError
from tests.core.test_disagreement import ODD, assert_named
from tests.core.worlds import REGIMES, errors_of
from tests.gpu.devices import DEVICE, awaited, gpu_world, settled

pytestmark = pytest.mark.gpu

WAYS = ("fused", "streams")


def gather(comm: Communicator, size: int = 300) -> torch.Tensor:
    make = comm.empty if comm.stats().heap_bytes else lambda shape: torch.empty(shape, device=comm.device)
    return comm.all_gather_into_tensor(
        make((comm.ranks * size,)), torch.full((size,), float(comm.rank), device=comm.device)
    )


@contextmanager
def the_gpu_lives() -> Iterator[None]:
    """Afterwards the context can be used, and a new world of the same GPU works."""
    yield
    assert torch.ones(1000, device=DEVICE).sum().item() == 1000
    with gpu_world(2) as world:
        assert all(out[::300].tolist() == [0.0, 1.0] for out in world.run(gather))
        settled(world)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("regime", REGIMES)
def test_a_rank_that_never_calls_is_named_within_the_timeout(way: str, regime: str) -> None:
    def work(comm: Communicator) -> object:
        return awaited(gather)(comm) if comm.rank == 0 else None

    with the_gpu_lives(), gpu_world(2, way, regime, timeout=0.5) as world:
        world.run(gather)
        settled(world)
        began = time.monotonic()
        error, fine = errors_of(world, work)
        assert fine is None and type(error) is StallError, error
        assert time.monotonic() - began < 5
        assert "waited 0.5 s for rank 1" in str(error) and "all_gather_into_tensor" in str(error)
        assert "rank 1 has not entered call #" in str(error)
        with pytest.raises(StallError, match=r"waited 0\.5 s for rank 1"):  # dead for good, and still says why
            gather(world.communicators[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("leaves", [False, True])
def test_bulk_copies_that_are_ahead_of_a_grant_end_when_none_comes(leaves: bool, way: str) -> None:
    """Who loads waits for cells then, which who stores would free."""
    xs = [torch.full((1 << 10, 1 << 12), rank, dtype=torch.int16, device=DEVICE) for rank in range(2)]

    def exchange(comm: Communicator) -> object:
        out = comm.empty((1 << 11, 1 << 11), torch.int16)
        return comm.redistribute(xs[comm.rank], "r@ c -> r c@", out=out)

    def work(comm: Communicator) -> object:
        if comm.rank == 0:
            return awaited(exchange)(comm)
        return comm.abort("the user pressed stop") if leaves else None

    with the_gpu_lives(), gpu_world(2, way, heap_bytes=64 << 20, timeout=0.5) as world:
        world.run(exchange)
        settled(world)
        assert world.communicators[0].stats().regimes == {"direct": 1}
        began = time.monotonic()
        error, _ = errors_of(world, work)
        assert time.monotonic() - began < 5
        assert type(error) is (PeerError if leaves else StallError), error
        assert "redistribute" in str(error) and (
            "the user pressed stop" if leaves else "waited 0.5 s for rank 1"
        ) in str(error)


def test_garbage_that_a_rank_collects_does_not_wait_for_the_kernel_of_another() -> None:
    """That kernel waits for this rank."""
    gc.collect()
    gc.disable()
    try:
        with gpu_world(2, "streams", timeout=2.0) as world:
            world.run(gather)
            settled(world)
            other = LocalWorld(2, DEVICE, fused=False)
            other.run(gather)
            circle: list[object] = [other]
            circle.append(circle)
            alive = weakref.ref(other)
            del other, circle

            def work(comm: Communicator) -> None:
                if comm.rank == 1:
                    time.sleep(0.2)
                    gc.collect()
                gather(comm)

            assert alive() is not None
            world.run(work)
            settled(world)
            assert alive() is None
    finally:
        gc.enable()


def test_a_rank_that_forgets_plans_does_not_wait_for_the_kernel_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of boxes keep memory of the GPU."""
    monkeypatch.setattr("purlin_core.plans.MOST_PLANS", 2)
    xs = [torch.full((8, 64), float(rank), device=DEVICE) for rank in range(2)]

    def work(comm: Communicator) -> None:
        for columns in range(2, 16, 2):
            x = xs[comm.rank][:, :columns]
            if comm.rank == 1:
                time.sleep(0.1)
            out = comm.redistribute(x, "r@ c -> r c@")
            assert out.shape == (16, columns // 2)

    with gpu_world(2, "streams", timeout=2.0) as world:
        world.run(work)
        settled(world)
        assert all(len(comm._calls.plans) <= 2 for comm in world.communicators)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("remains", [False, True])
def test_a_world_can_be_made_while_a_rank_waits_for_another(remains: bool, way: str) -> None:
    """Whoever makes it waits for the GPU, and lets the thread of the other rank run meanwhile. `remains`: there is memory to be given back."""

    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(0.5)
        gather(comm)

    def made_meanwhile() -> None:
        time.sleep(0.2)
        with gpu_world(2, way) as other:
            other.run(gather)
            settled(other)

    with gpu_world(2, "streams", timeout=2.0) as world, ThreadPoolExecutor(1) as pool:
        world.run(gather)
        settled(world)
        if remains:
            LocalWorld(2, DEVICE)  # and nobody closes it
            gc.collect()
        other = pool.submit(made_meanwhile)
        world.run(work)
        other.result(timeout=30)
        settled(world)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_raises_inside_guard_is_named_with_its_text_at_once(way: str) -> None:
    known: list[tuple[float, str]] = []
    raised = [0.0]

    def work(comm: Communicator) -> None:
        with comm.guard():
            if comm.rank == 1:
                time.sleep(0.1)
                raised[0] = time.monotonic()
                raise MemoryError("out of memory\nand a second line")
            try:
                awaited(gather)(comm)
            except PeerError as error:
                known.append((time.monotonic(), str(error)))
                raise

    with the_gpu_lives(), gpu_world(2, way) as world:
        world.run(gather)
        with pytest.raises(MemoryError, match="out of memory"):
            world.run(work)
        ((when, text),) = known
        assert when - raised[0] < 2
        assert "rank 1 left: MemoryError: out of memory." in text and "all_gather_into_tensor" in text
        for error in errors_of(world, Communicator.check):
            assert type(error) is PeerError and "rank 1 left: MemoryError" in str(error)


@pytest.mark.parametrize("way", WAYS)
def test_abort_says_why_on_every_rank(way: str) -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort("the user pressed stop")
        awaited(gather)(comm)

    with the_gpu_lives(), gpu_world(2, way) as world:
        world.run(gather)
        for error in errors_of(world, work):
            assert type(error) is PeerError and "rank 1 left: the user pressed stop" in str(error)


@pytest.mark.parametrize("way", WAYS)
def test_a_closed_rank_is_named_by_who_waits_for_it(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purlin_core.connection.PARTING_TIMEOUT", 0.5)

    def work(comm: Communicator) -> str:
        gather(comm)
        if comm.rank == 1:
            comm.close()
            return ""
        began = time.monotonic()
        with pytest.raises(PeerError) as caught:
            awaited(gather)(comm)
        assert time.monotonic() - began < 5
        return str(caught.value)

    with the_gpu_lives(), gpu_world(2, way) as world:
        assert "rank 1 left: it closed its communicator" in world.run(work)[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_slow_rank_within_the_timeout_is_no_failure(way: str) -> None:
    def work(comm: Communicator) -> None:
        for turn in range(6):
            time.sleep(0.1 * (turn % 2 == comm.rank))
            gather(comm)
        awaited(gather)(comm)

    with gpu_world(2, way, timeout=10.0) as world:
        world.run(work)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", ODD)
def test_another_call_on_one_rank_is_named_on_all(name: str, regime: str) -> None:
    odd = ODD[name]

    def work(comm: Communicator) -> object:
        with torch.device(comm.device):
            return awaited(odd.odd if comm.rank == 1 else odd.rest)(comm)

    with gpu_world(3, "fused", regime, slot_bytes=4096) as world:
        world.run(Communicator.barrier)
        began = time.monotonic()
        errors = errors_of(world, work)
        assert time.monotonic() - began < 5
        assert_named(errors, odd.theirs, odd.its)
        assert all(type(error) is MismatchError for error in errors_of(world, gather))


@pytest.mark.parametrize("name", ["shape", "op", "tag", "a call left out"])
def test_disagreement_on_streams_is_named_and_the_gpu_lives(name: str) -> None:
    odd = ODD[name]

    def prepared(comm: Communicator) -> None:
        for n in (300, 301):
            torch.ones(n, device=comm.device)
            torch.ones(n * comm.ranks, device=comm.device)

    def work(comm: Communicator) -> object:
        with torch.device(comm.device):
            return awaited(odd.odd if comm.rank == 1 else odd.rest)(comm)

    with the_gpu_lives(), gpu_world(2, "streams") as world:
        world.run(prepared)
        world.run(Communicator.barrier)
        began = time.monotonic()
        errors = errors_of(world, work)
        assert time.monotonic() - began < 5
        assert all(type(error) is MismatchError and "rank 1 called" in str(error) for error in errors), errors


def test_who_waits_for_others_to_launch_hears_that_they_need_not_come() -> None:
    """The kernel of a first call fails while rank 1 has brought its second already; rank 0 never brings one."""

    def work(comm: Communicator) -> None:
        x = torch.ones(8, device=comm.device)
        torch.cuda._sleep(40_000_000)
        comm.redistribute(x, "n@ -> n", tag=f"of rank {comm.rank}")
        if comm.rank == 1:
            comm.redistribute(x, "n@ -> n", tag="second")
        torch.cuda.current_stream().synchronize()
        comm.check()

    with the_gpu_lives(), gpu_world(2, "fused") as world:
        world.run(gather)
        settled(world)
        began = time.monotonic()
        errors = errors_of(world, work)
        assert time.monotonic() - began < 5
        assert all(type(error) is MismatchError for error in errors), errors


def test_the_call_that_failed_is_named_not_the_ones_behind_it() -> None:
    """Rank 0 goes on making calls while its first waits in vain."""

    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            x = torch.ones(8, device=comm.device)
            comm.redistribute(x, "n@ -> n", tag="first")
            for _ in range(3):
                comm.redistribute(x, "n@ -> n", tag="behind")
            torch.cuda.current_stream().synchronize()
            comm.check()

    def both(comm: Communicator) -> None:
        x = torch.ones(8, device=comm.device)
        for tag in ("first", "behind"):
            comm.redistribute(x, "n@ -> n", tag=tag)

    with gpu_world(2, "streams", timeout=0.5) as world:
        world.run(both)
        settled(world)
        error = errors_of(world, work)[0]
        assert type(error) is StallError and "at first" in str(error) and "at behind" not in str(error), error


def test_a_dead_world_closes_at_once() -> None:
    began = time.monotonic()
    with gpu_world(2, "streams", timeout=0.2) as world:
        errors_of(world, lambda comm: comm.rank and gather(comm))
    assert time.monotonic() - began < 6


def test_more_teams_than_the_gpu_holds_are_refused() -> None:
    with pytest.raises(SetupError, match="16 ranks of 16 teams need 256 multiprocessors"):
        LocalWorld(16, DEVICE, fused=False, teams=16)
