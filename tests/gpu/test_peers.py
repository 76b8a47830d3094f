"""Ranks on GPUs of their own, as threads and as processes; and two processes that would share one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator, LocalWorld, PeerError, SetupError
from purlin_core.reference import reduce
from tests.core.processes import Meeting, Processes
from tests.core.worlds import TIMEOUT, random_tensor, same_bits

pytestmark = pytest.mark.gpu

SIZES = (3, 1000, 100_000, 3_000_001)


def shard(rank: int, size: int) -> Tensor:
    return random_tensor((size,), torch.int32, 1000 * rank + size)


def collectives(comm: Communicator) -> str:
    """Checks every collective at sizes for every regime."""
    ranks, rank = comm.ranks, comm.rank
    for size in SIZES:
        size *= ranks
        shards = [shard(r, size).to(comm.device) for r in range(ranks)]
        on_host, mine = [x.cpu() for x in shards], slice(size // ranks * rank, size // ranks * (rank + 1))
        gathered, granted = (
            torch.zeros(ranks * size, dtype=torch.int32, device=comm.device),
            comm.empty((ranks * size,), torch.int32),
        )
        for out in (gathered, granted):
            assert same_bits(comm.all_gather_into_tensor(out, shards[rank]), torch.cat(shards))
        part = comm.reduce_scatter_tensor(torch.zeros_like(shards[rank][mine]), shards[rank])
        assert same_bits(part.cpu(), reduce(on_host, "sum")[mine])
        assert same_bits(comm.all_reduce(shards[rank].clone(), "min").cpu(), reduce(on_host, "min"))
        for dtype in (torch.int32, torch.bfloat16):
            lent = comm.empty((size,), dtype).copy_(shards[rank])
            assert same_bits(comm.all_reduce(lent).cpu(), reduce([x.to(dtype) for x in on_host], "sum"))
        turned = comm.all_to_all_single(torch.zeros_like(shards[rank]), shards[rank])
        assert same_bits(turned, torch.cat([x[mine] for x in shards]))
        comm.barrier()
    comm.check()
    return str(comm.device)


HEAP = 10 * 4 * max(SIZES) + (1 << 20)


def sums_of_fresh_values(comm: Communicator) -> int:
    """In place, of what a kernel has written just before, read by one just behind; for one team to all. Counts wrong elements."""
    x, wrong = comm.empty((3 << 20,), torch.bfloat16).zero_(), torch.zeros((), dtype=torch.int64, device=comm.device)
    for turn in range(300):
        part = x[: (1000, 70_000, 3 << 20)[turn % 3]]
        part.fill_(turn % 50 + comm.rank)
        if turn == 0:  # torch's kernels are loaded while nobody waits in one of ours
            wrong += (part != comm.rank).sum()
            comm.barrier()
        comm.all_reduce(part)
        wrong += (part != comm.ranks * (turn % 50) + sum(range(comm.ranks))).sum()
    comm.check()
    return int(wrong)


@pytest.mark.usefixtures("two_gpus")
def test_sums_see_what_was_written_just_before() -> None:
    with LocalWorld(2, ["cuda:0", "cuda:1"], heap_bytes=HEAP, timeout=TIMEOUT) as world:
        assert world.run(sums_of_fresh_values) == [0, 0]


@pytest.mark.usefixtures("two_gpus")
def test_threads_with_a_gpu_each() -> None:
    with LocalWorld(2, ["cuda:0", "cuda:1"], heap_bytes=HEAP, timeout=TIMEOUT) as world:
        assert world.run(collectives) == ["cuda:0", "cuda:1"]


def in_a_process(rank: int, meeting: Meeting, environment: dict[str, str]) -> str:
    os.environ.update({name: value.format(rank=rank) for name, value in environment.items()})
    device = "cuda:0" if "CUDA_VISIBLE_DEVICES" in environment else f"cuda:{rank}"
    with meeting.communicator(rank, device=device, heap_bytes=HEAP) as comm:
        return collectives(comm)


@pytest.mark.parametrize(
    "environment",
    [{}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {"CUDA_VISIBLE_DEVICES": "{rank}"}],
    ids=["plain", "expandable", "one visible"],
)
@pytest.mark.usefixtures("two_gpus")
def test_processes_with_a_gpu_each(environment: dict[str, str], tmp_path: Path) -> None:
    with Meeting.of(2, tmp_path) as meeting, Processes(2, in_a_process, meeting, environment) as processes:
        answers = processes.answers()
    assert answers == (["cuda:0"] * 2 if "CUDA_VISIBLE_DEVICES" in environment else ["cuda:0", "cuda:1"])


def lives(rank: int, meeting: Meeting) -> tuple[float, str]:
    comm = meeting.communicator(rank, device=f"cuda:{rank}")
    comm.barrier()
    torch.cuda.synchronize()
    if rank == 1:
        meeting.mark("ready")
        time.sleep(30)
    try:
        comm.all_reduce(torch.ones(1000, device=comm.device))
        torch.cuda.synchronize()
        comm.check()
    except PeerError as error:
        return time.monotonic(), str(error)
    return 0.0, "no error"


@pytest.mark.usefixtures("two_gpus")
def test_the_death_of_a_process_is_known_by_name(tmp_path: Path) -> None:
    with Meeting.of(2, tmp_path) as meeting, Processes(2, lives, meeting) as processes:
        meeting.await_mark("ready")
        time.sleep(0.05)
        killed = time.monotonic()
        processes.signal(1, signal.SIGKILL)
        known, text = processes.answer(0)
    assert known - killed < 3
    assert "rank 1 died" in text and "all_reduce" in text


def shares(rank: int, meeting: Meeting) -> Any:
    try:
        meeting.communicator(rank, device="cuda:0").close()
    except SetupError as error:
        return str(error)
    return "no error"


def test_two_processes_on_one_gpu_are_refused_with_advice(tmp_path: Path) -> None:
    with Meeting.of(2, tmp_path) as meeting, Processes(2, shares, meeting) as processes:
        for text in processes.answers():
            assert "ranks 0 and 1 are both on GPU" in text and "LocalWorld" in text


def unlike(rank: int, meeting: Meeting) -> str:
    device = "cuda:0" if rank else "cpu"
    try:
        meeting.communicator(rank, device=device, teams=1).close()
    except SetupError as error:
        return str(error)
    return "no error"


def test_a_rank_on_a_gpu_and_one_on_the_cpu_are_refused_by_name(tmp_path: Path) -> None:
    with Meeting.of(2, tmp_path) as meeting, Processes(2, unlike, meeting) as processes:
        assert all("the same `device type`; rank 0 has 'cpu'" in text for text in processes.answers())
