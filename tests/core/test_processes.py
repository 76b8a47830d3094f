"""Ranks as processes over shared memory: right values, death, stops and interrupts seen by name, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from purlin_core import PeerError, StallError
from purlin_core.reference import reduce
from tests.core.processes import Meeting, Processes
from tests.core.worlds import random_tensor, same_bits

ROOT = Path(__file__).resolve().parents[2]


def shard(rank: int, size: int) -> Tensor:
    return random_tensor((size,), torch.int32, 1000 * rank + size)


def collectives(rank: int, meeting: Meeting) -> int:
    """Checks every collective at sizes for every regime; returns how many calls it made."""
    ranks = meeting.ranks
    with meeting.communicator(rank, heap_bytes=8 << 20, teams=1 + ranks % 2) as comm:
        for size in (ranks, 3 * ranks, 100 * ranks, 100_000 * ranks):
            shards = [shard(r, size) for r in range(ranks)]
            mine = slice(size // ranks * rank, size // ranks * (rank + 1))
            gathered, granted = torch.zeros(ranks * size, dtype=torch.int32), comm.empty((ranks * size,), torch.int32)
            for out in (gathered, granted):
                assert same_bits(comm.all_gather_into_tensor(out, shards[rank]), torch.cat(shards))
            part = comm.reduce_scatter_tensor(torch.zeros(size // ranks, dtype=torch.int32), shards[rank])
            assert same_bits(part, reduce(shards, "sum")[mine])
            assert same_bits(comm.all_reduce(shards[rank].clone(), "min"), reduce(shards, "min"))
            lent = comm.empty((size,), torch.int32).copy_(shards[rank])
            assert same_bits(comm.all_reduce(lent), reduce(shards, "sum"))
            turned = comm.all_to_all_single(torch.zeros(size, dtype=torch.int32), shards[rank])
            assert same_bits(turned, torch.cat([x[mine] for x in shards]))
            comm.barrier()
        return comm.stats().calls


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_collectives_between_processes(ranks: int, tmp_path: Path) -> None:
    with Meeting.of(ranks, tmp_path) as meeting, Processes(ranks, collectives, meeting) as processes:
        assert processes.answers() == [28] * ranks


def test_more_processes_than_cores_finish(tmp_path: Path) -> None:
    with Meeting.of(8, tmp_path) as meeting, Processes(8, many_small_calls, meeting) as processes:
        seconds = processes.answers()
    assert max(seconds) < 20, seconds


def many_small_calls(rank: int, meeting: Meeting) -> float:
    with meeting.communicator(rank) as comm:
        began = time.monotonic()
        for turn in range(300):
            size = 1 + turn % 10
            out = comm.redistribute(torch.full((size,), float(rank)), "n@ -> n")
            assert out[::size].tolist() == [float(r) for r in range(meeting.ranks)]
        return time.monotonic() - began


# ---- death


def lives(rank: int, meeting: Meeting, fatal: int) -> tuple[float, str, list[float]]:
    """Calls until somebody dies; then goes on with who is left. Returns when it knew, what it was told, and a sum over the rest."""
    comm = meeting.communicator(rank)
    comm.barrier()
    if rank == fatal:
        meeting.mark("ready")
        time.sleep(30)
    try:
        comm.all_reduce(torch.ones(1000))
    except PeerError as error:
        known, text = time.monotonic(), str(error)
    with pytest.raises(PeerError):
        comm.check()
    comm.close()
    left = [r for r in range(meeting.ranks) if r != fatal]
    with meeting.communicator(left.index(rank), ranks=len(left), name="rest") as rest:
        return known, text, rest.all_reduce(torch.full((3,), float(rank))).tolist()


@pytest.mark.parametrize("fatal", [0, 2])
def test_the_death_of_a_process_is_known_by_name_within_3_seconds(fatal: int, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with Meeting.of(3, tmp_path) as meeting, Processes(3, lives, meeting, fatal) as processes:
        meeting.await_mark("ready")
        time.sleep(0.05)  # the others are in their call by now; if not, they learn it at the next
        killed = time.monotonic()
        processes.signal(fatal, signal.SIGKILL)
        for rank in {0, 1, 2} - {fatal}:
            known, text, rest = processes.answer(rank)
            assert known - killed < 3
            assert f"rank {fatal} died" in text and "all_reduce" in text
            assert rest == [3.0 - fatal] * 3
    assert set(os.listdir("/dev/shm")) <= before


def stops(rank: int, meeting: Meeting) -> str:
    comm = meeting.communicator(rank, timeout=1.0)
    comm.barrier()
    if rank == 1:
        meeting.mark("ready")
        meeting.await_mark("stalled")
    began = time.monotonic()
    with pytest.raises(StallError) as caught:
        comm.barrier()
    waited, text = time.monotonic() - began, str(caught.value)
    assert waited >= 1 or f"rank {rank} waited" not in text  # who came later than another knows it sooner
    return text


def test_a_process_that_is_stopped_past_the_deadline_and_goes_on_learns_of_it(tmp_path: Path) -> None:
    with Meeting.of(3, tmp_path) as meeting, Processes(3, stops, meeting) as processes:
        meeting.await_mark("ready")
        processes.signal(1, signal.SIGSTOP)
        texts = [processes.answer(rank) for rank in (0, 2)]
        meeting.mark("stalled")
        processes.signal(1, signal.SIGCONT)
        texts.append(processes.answer(1))
    assert all("barrier" in text and "waited 1 s for rank 1" in text for text in texts), texts


def is_interrupted(rank: int, meeting: Meeting) -> tuple[str, str]:
    comm = meeting.communicator(rank)
    comm.barrier()
    if rank == 0:
        meeting.await_mark("interrupted")
    meeting.mark(f"waits {rank}")
    try:
        with comm.guard():
            comm.barrier()
    except (KeyboardInterrupt, PeerError) as error:
        meeting.mark("interrupted")
        return type(error).__name__, str(error)
    return "", ""


def test_an_interrupt_ends_a_wait_and_the_others_are_told(tmp_path: Path) -> None:
    with Meeting.of(3, tmp_path) as meeting, Processes(3, is_interrupted, meeting) as processes:
        meeting.await_mark("waits 1")
        time.sleep(0.2)
        processes.signal(1, signal.SIGINT)
        answers = processes.answers()
    assert answers[1][0] == "KeyboardInterrupt"
    for rank in (0, 2):
        kind, text = answers[rank]
        assert kind == "PeerError" and "rank 1 left: KeyboardInterrupt" in text


# ---- leaving


def leaves_without_close(rank: int, meeting: Meeting) -> str:
    comm = meeting.communicator(rank)
    comm.barrier()
    if rank == 1:
        return "gone"
    time.sleep(0.3)
    comm.check()  # whoever does not wait for rank 1 is fine
    with pytest.raises(PeerError) as caught:
        comm.barrier()
    return str(caught.value)


def test_a_process_that_ends_without_close_hurts_nobody_who_does_not_wait_for_it(tmp_path: Path) -> None:
    with Meeting.of(2, tmp_path) as meeting, Processes(2, leaves_without_close, meeting) as processes:
        began = time.monotonic()
        assert processes.answer(1) == "gone" and processes.exit_code(1) == 0
        text = processes.answer(0)
        assert time.monotonic() - began < 5
    assert "rank 1 left" in text and "barrier" in text


PROGRAM = """
import sys, time, torch
from purlin_core import Communicator, PeerError
from torch.distributed import TCPStore
rank, port = int(sys.argv[1]), int(sys.argv[2])
comm = Communicator(TCPStore("localhost", port), rank=rank, ranks=2, heap_bytes=4096)
kept = comm.empty((4,))
comm.all_gather_into_tensor(kept, torch.ones(2))
if rank == 1:
    raise ValueError("nobody guards this")
began = time.monotonic()
try:
    comm.barrier()
except PeerError as error:
    print(error, time.monotonic() - began < 3)
"""


def test_a_program_that_ends_without_close_is_silent_and_its_peers_learn_of_it(tmp_path: Path) -> None:
    """Rank 1 ends by an exception outside guard(), rank 0 at the end of its program: neither closes, and a granted tensor is still about."""
    with Meeting.of(2, tmp_path) as meeting:
        programs = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(rank), str(meeting.port)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for rank in range(2)
        ]
        try:
            (said, silent), (_, trace) = (program.communicate(timeout=60) for program in programs)
        finally:
            for program in programs:
                program.kill()
    assert said.startswith("barrier") and "rank 1 left" in said and said.strip().endswith("True"), said
    assert silent == "" and programs[0].returncode == 0
    assert trace.strip().endswith("ValueError: nobody guards this") and trace.count("Error") == 1, trace


def forks(rank: int, meeting: Meeting) -> list[float]:
    comm = meeting.communicator(rank, heap_bytes=1 << 16)
    out = comm.empty((2,))
    comm.all_gather_into_tensor(out, torch.tensor([rank + 1.0]))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            comm.barrier()
        except RuntimeError as error:
            code = 0 if "forked from" in str(error) else 2
        comm.close()
        del comm
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    for _ in range(3):
        comm.all_gather_into_tensor(out, torch.tensor([rank + 5.0]))
    comm.check()
    comm.close()
    return out.tolist()


def test_a_fork_leaves_the_parent_s_communicator_working_and_the_child_s_harmless(tmp_path: Path) -> None:
    with Meeting.of(2, tmp_path) as meeting, Processes(2, forks, meeting) as processes:
        assert processes.answers() == [[5.0, 6.0]] * 2
