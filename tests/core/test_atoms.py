"""What a device adds to a communicator (a stream, captures, an exchange at set-up, an end that is waited for), shown on a CPU that has a lane;
and every reason for which a GPU cannot be used."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from purlin_core import Communicator, DeviceError, LocalWorld, PeerError, SetupError, _cpu, connection, cuda
from purlin_core.atom import Host
from purlin_core.cuda_memory import ThreadMemory, _Steps
from purlin_core.rendezvous import LocalRendezvous
from purlin_core.settings import plain_rendezvous
from purlin_core.terms import check_cards
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


# ---- a GPU that cannot be used


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with one good GPU, as torch and the driver tell it."""
    machine = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, uuid="GPU-1", multi_processor_count=132)
    monkeypatch.setattr(cuda, "_module", lambda: _cpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: machine)
    monkeypatch.setattr(cuda, "_driver_version", lambda: 13000)
    return machine


def test_a_good_gpu_is_opened(gpu: SimpleNamespace) -> None:
    atom = cuda.open_cuda(torch.device("cuda", 0))
    assert (atom.device, atom.identity, atom.processors) == (torch.device("cuda:0"), "GPU-1", 132)
    assert [atom.scratch(8, teams=None, sharing=n).teams for n in (1, 8, 200)] == [32, 16, 1]
    assert atom.scratch(2, teams=5, sharing=1).teams == 5


def no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("importlib.import_module", lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name)))


def a_cpu_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)


def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda, "_driver_version", lambda: 0)


def an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda, "_driver_version", lambda: 12040)


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(name="Tesla T4", major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: old)


@pytest.mark.parametrize(
    ("lack", "words"),
    [
        (no_module, "built without CUDA.*PURLIN_CUDA=ON pip install"),
        (a_cpu_torch, "is a CPU build. Install a CUDA build"),
        (no_driver, "no NVIDIA driver is loaded"),
        (an_old_driver, "too old: it knows CUDA 12.4, and torch was built for 13.0.*580"),
        (no_gpu, "torch sees no GPU.*CUDA_VISIBLE_DEVICES"),
        (an_old_gpu, r"'cuda:0' \(Tesla T4\) is sm_75; purlin needs sm_80"),
    ],
)
def test_why_a_gpu_cannot_be_used(lack: Any, words: str, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    lack(monkeypatch)
    with pytest.raises(DeviceError, match=words):
        cuda.open_cuda(torch.device("cuda", 0))


def test_a_gpu_that_is_not_there_is_named(gpu: SimpleNamespace) -> None:
    with pytest.raises(DeviceError, match="there is no 'cuda:3'; torch sees 1 GPU"):
        cuda.open_cuda(torch.device("cuda", 3))


# ---- GPUs that do not fit together


class OnGpu:
    """As much of an Atom as is looked at."""

    device = torch.device("cuda", 0)


def card(rank: int, **changes: Any) -> dict[str, Any]:
    machine = os.uname().nodename
    return {"machine": machine, "pid": rank, "device": "cuda:0", "identity": f"GPU-{rank}", "terms": {}} | changes


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"GPU-{i}"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("cards", "words"),
    [
        ([card(0), card(1, identity="GPU-0")], "ranks 0 and 1 are both on GPU GPU-0.*LocalWorld"),
        ([card(0), card(1, pid=0)], "ranks 0 and 1 on 'cuda:0' are of one process.*LocalWorld"),
        ([card(0), card(1, machine="elsewhere")], "a peer is on 'elsewhere'"),
        ([card(0, terms={"tuning": "a"}), card(1, terms={"tuning": "b"})], "the same `tuning`; rank 0 has 'a', rank 1"),
    ],
)
def test_processes_that_do_not_fit_are_named(cards: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        check_cards(cards, OnGpu(), local=False)  # type: ignore[arg-type]


@pytest.mark.usefixtures("two_gpus")
def test_gpus_without_access_are_named_and_those_that_are_not_visible_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: False)
    with pytest.raises(SetupError, match=r"GPU 0 cannot reach the memory of GPU 1 \(no P2P\)"):
        check_cards([card(0), card(1)], OnGpu(), local=False)  # type: ignore[arg-type]
    check_cards([card(0), card(1, identity="GPU-5")], OnGpu(), local=False)  # type: ignore[arg-type]


def test_threads_whose_gpus_have_no_access_are_refused_on_every_rank() -> None:
    reached: list[int] = []
    native = SimpleNamespace(can_reach=lambda one, other: (one, other) != (1, 2), reach=reached.append)
    arenas: list[Any] = [SimpleNamespace(device=torch.device("cuda", i)) for i in range(3)]
    for rank, arena in enumerate(arenas):
        with pytest.raises(SetupError, match="GPU 1 cannot reach the memory of GPU 2"):
            ThreadMemory(native, arena.device).map(arena, rank, arenas, [1, 1, 1])
    assert not reached
    native.can_reach = lambda one, other: True
    assert ThreadMemory(native, arenas[1].device).map(arenas[1], 1, arenas, [1, 1, 1]) == arenas
    assert reached == [0, 2]


# ---- torch's rendezvous


def test_ranks_that_count_rendezvous_differently_still_meet() -> None:
    """torch counts all rendezvous of a process in its keys; rank 1 took part in 40 more."""
    shared = HashStore()

    def meet(rank: int) -> list[bytes]:
        steps = _Steps(shared, 5.0)  # torch's side of it works as long as this one lives
        store = PrefixStore("beneath", steps)
        found = []
        for turn in range(3):
            at = 40 * rank + turn
            store.set(f"Memory/{at}/{rank}", bytes([turn, rank, 255]))
            found += store.multi_get([f"Memory/{at}/{r}" for r in range(2)])
        store.barrier(f"Memory/{40 * rank + 3}", 2)
        return found

    wanted = [bytes([turn, rank, 255]) for turn in range(3) for rank in range(2)]
    assert on_threads(2, meet) == [wanted, wanted]


def test_a_rendezvous_ends_in_time() -> None:
    steps = _Steps(HashStore(), 0.1)
    store = PrefixStore("beneath", steps)
    with pytest.raises(Exception, match=r"[Tt]imeout"):
        store.multi_get(["Memory/0/1"])
    with pytest.raises(Exception, match=r"[Tt]imeout"):
        store.wait(["Memory/0/1"], timedelta(seconds=0.1))


@pytest.mark.parametrize("before", [None, "0"])
def test_a_rendezvous_leaves_the_environment_as_it_was(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)

    def inside() -> Iterator[str | None]:
        with plain_rendezvous():
            yield os.environ.get(name)

    assert list(inside()) == ["1"] and os.environ.get(name) == before


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
