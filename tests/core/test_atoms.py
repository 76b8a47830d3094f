"""What a device adds to a communicator (a stream, captures, an exchange at set-up, an end that is waited for), shown on a CPU that has a lane."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from purlin_core import Communicator, DeviceError, LocalWorld, PeerError, SetupError, _cpu, connection
from purlin_core.atom import Host
from purlin_core.rendezvous import LocalRendezvous
from tests.core.worlds import TIMEOUT, errors_of, on_threads


class Lane:
    """Of a device whose stream is 7."""

    def __init__(self, *, ends: bool = True) -> None:
        self.captured = False
        self.ends, self.entered, self.asked = ends, 0, 0

    def enter(self) -> int:
        self.entered += 1
        return 7

    def capturing(self) -> bool:
        return self.captured

    def settled(self, timeout: float) -> bool:
        self.asked += 1
        return self.ends


class Laned(Host):
    """The CPU with a lane, and with any of its native names replaced."""

    def __init__(self, *, ends: bool = True, processors: int = 1 << 30, **names: Any) -> None:
        vars(self).update(processors=processors, ends=ends)
        vars(self)["native"] = SimpleNamespace(**{**vars(_cpu), **names})

    def lane(self) -> Any:
        return Lane(ends=vars(self)["ends"])


@pytest.fixture
def laned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes worlds of such devices."""
    monkeypatch.setattr("purlin_core.connection._left_behind", [])

    def make(ranks: int = 2, *, atom: Laned | None = None, fused: bool = False, **arguments: Any) -> LocalWorld:
        world = LocalWorld(1)
        world.close()
        meeting = LocalRendezvous.Meeting(ranks, sharing=ranks, fused=fused)
        arguments = {"timeout": TIMEOUT, "setup_timeout": TIMEOUT, **arguments}
        with monkeypatch.context() as patch:
            patch.setattr("purlin_core.opening.atom_of", lambda _: atom or Laned())
            made = on_threads(ranks, lambda rank: Communicator(LocalRendezvous(meeting, rank), **arguments))
        world.ranks, world._seats, world.communicators = ranks, world._seats * ranks, made
        return world

    return make


def gather(comm: Communicator, size: int = 3) -> list[float]:
    return comm.redistribute(torch.full((size,), float(comm.rank)), "n@ -> n")[::size].tolist()


def test_each_call_is_on_the_lane_and_set_up_has_made_one(laned: Any) -> None:
    with laned() as world:
        lanes = [comm._calls.tie.lane for comm in world.communicators]
        assert [lane.entered for lane in lanes] == [1, 1]
        assert [comm.stats().calls for comm in world.communicators] == [0, 0]
        assert world.run(gather) == [[0.0, 1.0]] * 2
        assert [lane.entered for lane in lanes] == [2, 2]


class Spoils(_cpu.Endpoint):
    """Changes a byte of what came from rank 1."""

    def run(self, plan: _cpu.Plan, inputs: Sequence[int], outputs: Sequence[int], stream: int) -> int:
        code = super().run(plan, inputs, outputs, stream)
        at = ctypes.c_uint8.from_address(outputs[0] + 60)
        at.value ^= 1
        return code


@pytest.mark.parametrize(
    ("atom", "words"),
    [
        (Laned(Endpoint=Spoils), "bytes from rank 1 did not come, or came wrong"),
        (Laned(ends=False), f"its first call did not end within {TIMEOUT / 2:g} s"),
    ],
)
def test_bytes_that_do_not_arrive_are_seen_at_set_up(atom: Laned, words: str, laned: Any) -> None:
    with pytest.raises(SetupError, match=words):
        laned(atom=atom)


def test_a_capture_takes_calls_that_are_prepared_and_no_others(laned: Any) -> None:
    def work(comm: Communicator) -> None:
        lane: Any = comm._calls.tie.lane
        x, out = torch.ones(5), torch.zeros(10)
        comm.plan([x], "n@ -> n", call="redistribute")
        comm.plan([x], ["n@ -> n"], out=[out])
        lane.captured = True
        assert comm.redistribute(x, "n@ -> n").sum() == 10
        assert comm.exchange([x], ["n@ -> n"], out=[out])[0].sum() == 10
        for call in (
            lambda: comm.redistribute(x[1:], "n@ -> n"),
            lambda: comm.all_reduce(x),
            lambda: comm.all_to_all_single(out, out.clone(), [5, 5], [5, 5]),
        ):
            with pytest.raises(
                DeviceError, match=r"first of its shapes. Make it once before the capture, or .*plan\(\)"
            ):
                call()
        lane.captured = False
        assert comm.all_reduce(x).sum() == 10

    with laned() as world:
        world.run(work)


def test_plans_that_a_graph_holds_are_never_freed(laned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purlin_core.plans.MOST_PLANS", 3)

    def work(comm: Communicator) -> None:
        lane: Any = comm._calls.tie.lane
        gather(comm, 50)
        lane.captured = True
        gather(comm, 50)
        lane.captured = False
        for size in range(1, 9):
            gather(comm, size)
        assert len(comm._calls.plans) <= 3 and comm.stats().calls == 10
        (kept,) = comm._calls.plans._captured
        assert "n=50+50" in kept.text

    with laned() as world:
        world.run(work)


@pytest.mark.parametrize("fused", [True, False])
def test_what_destructors_leave_is_given_back_where_no_rank_waits_for_this_thread(
    fused: bool, laned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At set-up, at close, and when plans were forgotten: then not where the kernel of another rank may wait for this thread's next call."""
    monkeypatch.setattr("purlin_core.plans.MOST_PLANS", 3)
    made: list[Communicator] = []
    plans_then: list[int] = []

    def give_back() -> None:
        plans_then.append(sum(len(comm._calls.plans) for comm in made))

    world = laned(atom=Laned(give_back=give_back), fused=fused)
    made += world.communicators
    assert plans_then == [0, 0]
    world.run(lambda comm: [gather(comm, size) for size in range(1, 9)])
    assert (len(plans_then) > 2) == fused
    before = len(plans_then)
    world.close()
    assert len(plans_then) == before + 2 and plans_then[-1] == 0
    assert all(comm._calls.last is None for comm in made)


def test_what_is_captured_is_not_watched(laned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary is looked at by the host, which cannot wait for what only a replay will run."""
    monkeypatch.setenv("PURLIN_CHECK", "1")
    looks = []
    monkeypatch.setattr("purlin_core.canary.Canaries.look", lambda *_: looks.append(1))

    def work(comm: Communicator) -> None:
        gather(comm)
        comm._calls.tie.lane.captured = True  # type: ignore[union-attr]
        gather(comm)
        comm._calls.tie.lane.captured = False  # type: ignore[union-attr]

    with laned() as world:
        world.run(work)
    assert len(looks) == 2


def test_close_waits_for_calls_and_aborts_those_that_do_not_end(laned: Any) -> None:
    world = laned()
    first, second = world.communicators
    lane: Any = first._calls.tie.lane
    asked, lane.ends = lane.asked, False
    first.close()
    assert lane.asked > asked
    assert len(connection._left_behind) == 1  # its memory, which a kernel may still use
    with pytest.raises(PeerError, match="rank 0 left"):
        second.check()
    second.close()


def test_close_gives_the_memory_back_but_for_tensors_that_live(laned: Any) -> None:
    world = laned(heap_bytes=4096)
    kept = world.run(lambda comm: comm.empty((8,)).fill_(comm.rank))
    world.close()
    for comm in world.communicators:
        assert comm._calls.tie.heap._arena is None and not hasattr(comm._calls.tie, "end")
        assert comm.stats().heap_bytes == 4096
        comm.close()
    assert [x.sum().item() for x in kept] == [0.0, 8.0]


class Remembers(_cpu.Endpoint):
    """Says which call failed."""

    signature = 0


def test_a_failed_call_is_named_though_others_were_enqueued_behind_it(laned: Any) -> None:
    with laned(atom=Laned(Endpoint=Remembers)) as world:
        world.run(gather)
        comm = world.communicators[0]
        failed = comm._calls.last
        world.run(lambda comm: gather(comm, 9))
        comm._calls.tie.end.signature = failed.signature
        comm.abort("enough")
        with pytest.raises(PeerError, match="n=3") as caught:
            comm.check()
        assert "n=9" not in str(caught.value)
        with pytest.raises(PeerError, match="rank 0 left: enough"):
            world.communicators[1].check()


def test_an_abort_of_a_peer_is_seen_by_who_makes_no_call(laned: Any) -> None:
    """On a GPU the word of an abort meets a rank in its next call; check() reads the boards as well."""

    class Deaf(_cpu.Endpoint):
        def abort(self, fault: int, about: int) -> None:
            if threading.current_thread() is threading.main_thread():
                return
            super().abort(fault, about)

    with laned(atom=Laned(Endpoint=Deaf)) as world:
        world.communicators[1].abort("the user pressed stop")
        for error in errors_of(world, Communicator.check):
            assert type(error) is PeerError and "rank 1 left: the user pressed stop" in str(error)


# ---- ranks that share a device


def test_kernels_that_wait_for_each_other_must_fit_on_the_device(laned: Any) -> None:
    with pytest.raises(
        SetupError, match=r"2 ranks of 5 teams need 10 multiprocessors; 'cpu' has 9\. Pass teams=4 or less"
    ):
        laned(atom=Laned(processors=9), teams=5)
    with laned(atom=Laned(processors=9), teams=4) as world:
        assert world.run(gather) == [[0.0, 1.0]] * 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_fused_world_fuses_all_its_ranks_once_a_connection(ranks: int, laned: Any) -> None:
    fused: list[int] = []
    with laned(
        ranks, atom=Laned(fuse=lambda ends: fused.append(len(ends)), processors=1), fused=True, teams=2
    ) as world:
        assert fused == [ranks]
        world.run(lambda comm: comm.reserve(4096))
        assert fused == [ranks] * 2


def test_a_world_that_cannot_be_fused_says_why_on_all_ranks(laned: Any) -> None:
    def refuse(ends: object) -> None:
        raise ValueError("more teams than this GPU can hold at once")

    with pytest.raises(SetupError, match="more teams than this GPU can hold at once"):
        laned(atom=Laned(fuse=refuse), fused=True)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (["cpu"], "a device for each of 2 ranks; got 1"),
        (["cpu", "meta"], "'cpu' or 'cuda'"),
        ("nowhere", "torch device"),
    ],
)
def test_devices_of_a_world_are_checked(devices: Any, words: str) -> None:
    with pytest.raises((SetupError, DeviceError), match=words):
        LocalWorld(2, device=devices)


def test_a_world_may_name_a_device_a_rank() -> None:
    with LocalWorld(2, device=["cpu", "cpu"], fused=False) as world:
        assert world.run(gather) == [[0.0, 1.0]] * 2
