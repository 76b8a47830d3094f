"""How ranks find each other: through groups, meshes and stores; who does not fit or does not come is named; nothing is shared or left."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store
from torch.distributed.device_mesh import init_device_mesh

from purlin_core import Communicator, DeviceError, LocalWorld, PurlinError, SetupError
from purlin_core.rendezvous import LocalRendezvous
from purlin_core.tune import Scratch
from tests.core.processes import Meeting, Processes
from tests.core.worlds import TIMEOUT, on_threads, scratch_for

# ---- groups, meshes, stores


def sum_of(comm: Communicator) -> float:
    return comm.all_reduce(torch.tensor([1.0 + comm.rank])).item()


def in_groups(rank: int, meeting: Meeting) -> list[Any]:
    """Of four processes: all of them, both dims of a mesh of 2 x 2, a subgroup of three in another order, and who is no member."""
    dist.init_process_group("gloo", store=meeting.store("gloo"), rank=rank, world_size=meeting.ranks)
    with Communicator(timeout=TIMEOUT) as everyone:
        found: list[Any] = [(everyone.rank, everyone.ranks, sum_of(everyone))]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for name in ("outer", "inner"):
        with Communicator(mesh[name], timeout=TIMEOUT) as comm:
            gathered = comm.redistribute(torch.tensor([float(rank)]), "n@ -> n").tolist()
            found.append((comm.rank, comm.ranks, gathered))
    three = dist.new_group([0, 2, 3])
    try:
        with Communicator(three, timeout=TIMEOUT) as comm:
            found.append((comm.rank, comm.ranks, sum_of(comm)))
    except SetupError as error:
        found.append(str(error))
    with pytest.raises(SetupError, match="2 dims names no single group"):
        Communicator(mesh)
    with pytest.raises(SetupError, match="go with a Store only"):
        Communicator(three, rank=0, ranks=3)
    dist.destroy_process_group()
    return found


def test_a_communicator_of_a_group_of_a_mesh_dim_and_of_a_subgroup(tmp_path: Path) -> None:
    with Meeting.of(4, tmp_path) as meeting, Processes(4, in_groups, meeting) as processes:
        answers = processes.answers()
    for rank, (everyone, outer, inner, three) in enumerate(answers):
        assert everyone == (rank, 4, 10.0)
        assert outer == (rank // 2, 2, [float(rank % 2), rank % 2 + 2.0])
        assert inner == (rank % 2, 2, [rank // 2 * 2.0, rank // 2 * 2 + 1.0])
        assert three == (
            "Communicator: this process is not a member of the group." if rank == 1 else ([0, 2, 3].index(rank), 3, 6.0)
        )


def test_without_a_group_the_error_says_what_to_do() -> None:
    with pytest.raises(SetupError, match=r"init_process_group first, pass a Store, or use LocalWorld"):
        Communicator()


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_a_communicator_of_any_store(kind: str, tmp_path: Path) -> None:
    shared = HashStore()

    def store(meeting: Meeting) -> Store:
        if kind == "tcp":
            return meeting.store()
        return shared if kind == "hash" else FileStore(str(tmp_path / "store"), 3)

    with Meeting.of(3, tmp_path) as meeting:

        def work(rank: int) -> float:
            kept = store(meeting)
            with Communicator(kept, rank=rank, ranks=3, timeout=TIMEOUT) as comm:
                return sum_of(comm)

        assert on_threads(3, work) == [6.0] * 3


@pytest.mark.parametrize("arguments", [{}, {"rank": 0}, {"rank": 2, "ranks": 2}, {"rank": -1, "ranks": 2}])
def test_a_store_needs_to_be_told_the_ranks(arguments: dict[str, int]) -> None:
    with pytest.raises(SetupError, match="a Store needs `rank` and `ranks`"):
        Communicator(HashStore(), **arguments)  # type: ignore[arg-type]


# ---- who does not fit


def together(ranks: int, *arguments: dict[str, Any]) -> list[BaseException | None]:
    """What making a communicator raised on each rank; the last of `arguments` are those of the last rank."""
    store = HashStore()

    def work(rank: int) -> BaseException | None:
        try:
            mine = arguments[-1] if rank == ranks - 1 else arguments[0]
            Communicator(store, rank=rank, ranks=ranks, **{"setup_timeout": 5.0, **mine}).close()
        except PurlinError as error:
            return error
        return None

    return on_threads(ranks, work)


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("heap_bytes", {"heap_bytes": 4096}, {"heap_bytes": 8192}),
        ("teams", {"teams": 1}, {"teams": 2}),
        ("packet_bytes", {"scratch": scratch_for("packet")}, {"scratch": scratch_for("staged")}),
        ("slots", {"scratch": scratch_for("staged")}, {"scratch": scratch_for("staged", slots=2)}),
    ],
)
def test_other_terms_on_one_rank_are_refused_by_name_on_all(
    name: str, usual: dict[str, Any], other: dict[str, Any]
) -> None:
    for error in together(3, usual, other):
        assert type(error) is SetupError, error
        assert f"the same `{name}`; rank 0 has" in str(error) and "rank 2 has" in str(error)


def test_another_number_of_ranks_is_refused() -> None:
    store = HashStore()

    def work(rank: int) -> str:
        with pytest.raises(SetupError) as caught:
            Communicator(store, rank=rank, ranks=2 + rank, setup_timeout=1.0)
        return str(caught.value)

    assert "`ranks`; rank 0 has 2, rank 1 has 3" in on_threads(2, work)[0]


def test_settings_of_one_rank_are_refused_by_name_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from purlin_core.settings import Settings

    monkeypatch.setattr(
        Settings, "from_environment", lambda: Settings(check=threading.current_thread().name.endswith("_1"))
    )
    errors = together(2, {})
    assert all(type(error) is SetupError and "the same `check`" in str(error) for error in errors), errors


def test_who_does_not_come_is_named_in_time() -> None:
    store = HashStore()

    def work(rank: int) -> str:
        with pytest.raises(SetupError) as caught:
            Communicator(store, rank=rank, ranks=4, setup_timeout=0.5)
        return str(caught.value)

    began = time.monotonic()
    texts = on_threads(3, work)
    assert time.monotonic() - began < 3
    assert all("rank 3 did not come within 0.5 s" in text for text in texts), texts


def test_a_missing_thread_is_named_in_time() -> None:
    meeting = LocalRendezvous.Meeting(3)

    def work(rank: int) -> str:
        with pytest.raises(SetupError) as caught:
            Communicator(LocalRendezvous(meeting, rank), setup_timeout=0.5)
        return str(caught.value)

    assert all("within 0.5 s" in text and "rank 2" in text for text in on_threads(2, work))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "meta"}, "needs to be 'cpu' or 'cuda'"),
        ({"timeout": 0}, "positive timeouts"),
        ({"setup_timeout": -1}, "positive timeouts"),
        ({"heap_bytes": -1}, "from 0 to 2"),
        ({"teams": 0}, "1 to 32 `teams`"),
        ({"teams": 33}, "1 to 32 `teams`"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((SetupError, DeviceError), match=words):
        Communicator(HashStore(), **{"rank": 0, "ranks": 1, **arguments})


@pytest.mark.parametrize("wrong", [{"slot_bytes": 100}, {"slots": 0}, {"teams": 0}, {"window_bytes": 8}])
def test_a_scratch_that_cannot_work_is_refused(wrong: dict[str, int]) -> None:
    right = {"teams": 1, "slots": 4, "slot_bytes": 64, "window_bytes": 64, "packet_bytes": 64}
    with pytest.raises(SetupError, match="Scratch: needs"):
        Scratch(**{**right, **wrong})


@pytest.mark.parametrize("ranks", [0, 17])
def test_a_world_of_no_or_too_many_ranks_is_refused(ranks: int) -> None:
    with pytest.raises(SetupError, match=str(ranks)):
        LocalWorld(ranks)


# ---- nothing shared, nothing left


def test_two_communicators_of_one_group_do_not_mix() -> None:
    """Their calls interleave differently on each rank."""
    store = HashStore()

    def work(rank: int) -> list[list[float]]:
        pair = [Communicator(store, rank=rank, ranks=2, timeout=TIMEOUT) for _ in range(2)]
        outs: list[list[float]] = [[], []]
        threads = [threading.Thread(target=many, args=(pair[i], i, outs[i], 0.001 * (rank ^ i))) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        for comm in pair:
            comm.close()
        return outs

    def many(comm: Communicator, which: int, outs: list[float], pause: float) -> None:
        for turn in range(100):
            time.sleep(pause if turn % 10 == 0 else 0)
            outs.append(comm.all_reduce(torch.tensor([10.0**which * turn])).item())

    for first, second in on_threads(2, work):
        assert first == [2.0 * turn for turn in range(100)] and second == [20.0 * turn for turn in range(100)]


STRETCHES = 5


def held() -> dict[str, int]:
    """What this process has: mappings of files are those of ours, too; anonymous ones are also the stacks and arenas of threads."""
    gc.collect()
    backed = [len(line.split()) > 5 and "/" in line for line in Path("/proc/self/maps").read_text().splitlines()]
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    return {"files": files, "threads": threads, "mappings of files": sum(backed), "others": len(backed) - sum(backed)}


def check_that_nothing_stays(some: Callable[[int], None], cycles: int) -> None:
    """`some` runs a number of cycles. A leak grows in every stretch of them; stacks and arenas, which are kept for later threads, in a few."""
    some(3)
    seen = [held()]
    for _ in range(STRETCHES):
        some(cycles // STRETCHES)
        seen.append(held())
    for what in seen[0]:
        counts = [then[what] for then in seen]
        assert any(later <= earlier for earlier, later in pairwise(counts)), (what, counts)
        assert what == "others" or counts[-1] <= counts[0] + 3, (what, counts)


def test_a_file_that_stays_is_noticed() -> None:
    kept: list[int] = []
    try:
        with pytest.raises(AssertionError):
            check_that_nothing_stays(
                lambda cycles: kept.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(cycles)), 10
            )
    finally:
        for file in kept:
            os.close(file)


def open_and_close(close: Callable[[list[Communicator]], None], cycles: int) -> None:
    small = scratch_for("packet")
    store = HashStore()
    for _ in range(cycles):
        made = on_threads(
            2, lambda rank: Communicator(store, rank=rank, ranks=2, timeout=TIMEOUT, heap_bytes=4096, scratch=small)
        )
        close(made)


def close_all(made: list[Communicator]) -> None:
    on_threads(2, lambda rank: made[rank].barrier())
    kept = made[0].empty((3,))
    on_threads(2, lambda rank: made[rank].close())
    del kept


def just_drop(made: list[Communicator]) -> None:
    made.clear()


@pytest.mark.parametrize(("close", "cycles"), [(close_all, 1000), (just_drop, 100)])
def test_nothing_grows_over_many_communicators(close: Callable[[list[Communicator]], None], cycles: int) -> None:
    shared = set(os.listdir("/dev/shm"))
    check_that_nothing_stays(partial(open_and_close, close), cycles)
    assert set(os.listdir("/dev/shm")) <= shared


def test_a_set_up_that_failed_leaves_nothing() -> None:
    def fail(cycles: int) -> None:
        for _ in range(cycles):
            with pytest.raises(SetupError):
                Communicator(HashStore(), rank=0, ranks=2, setup_timeout=0.01)

    check_that_nothing_stays(fail, 100)


def test_a_world_of_threads_leaves_nothing() -> None:
    def open_and_close_worlds(cycles: int) -> None:
        for _ in range(cycles):
            with LocalWorld(3, timeout=TIMEOUT) as world:
                world.run(Communicator.barrier)

    check_that_nothing_stays(open_and_close_worlds, 100)
