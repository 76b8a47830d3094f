"""Ours beside gloo on the CPU.

Ranks are processes of one thread each. `bytes` are those of a rank's input, f32. A row gives microseconds a call: the slowest rank's of each round,
then median, minimum and the middle half over the rounds; and how many times as fast as gloo that is. Results are checked before and after.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # in ranks too, which import this before torch

import torch
import torch.distributed as dist
from torch import Tensor

from purlin_core import Communicator

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
GLOO, OURS, GRANTED = "gloo", "purlin", "purlin, granted"  # the last: with comm.empty()
ROUND_S = 0.01  # a rival's turn in a round lasts about so long, and at least one call
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Rival:
    """One way to make one call, and whether its last result was right."""

    name: str
    call: Callable[[], object]
    right: Callable[[], bool]


@dataclass(frozen=True)
class Row:
    """Microseconds a call of one rival; `times_gloo`, by median and by minimum."""

    op: str
    bytes: int
    rival: str
    rounds: int
    median_us: float
    min_us: float
    quarter_us: tuple[float, float]
    times_gloo: float
    times_gloo_min: float


@dataclass(frozen=True)
class Job:
    ranks: int
    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int
    folder: str  # where ranks meet and rows come back


# ---- what is compared ------------------------------------------------------------------------------------------------


def all_gather(comm: Communicator, size: int) -> list[Rival]:
    wanted = torch.cat([_input(rank, size) for rank in range(comm.ranks)])
    gloo = _of_torch("all_gather_single", "all_gather_into_tensor")
    return _rivals(comm, _input(comm.rank, size), wanted, gloo, comm.all_gather_into_tensor)


def reduce_scatter(comm: Communicator, size: int) -> list[Rival]:
    wanted = _total(comm.ranks, size).chunk(comm.ranks)[comm.rank]
    gloo = _of_torch("reduce_scatter_single", "reduce_scatter_tensor")
    return _rivals(comm, _input(comm.rank, size), wanted, gloo, comm.reduce_scatter_tensor, lends=True)


def all_to_all(comm: Communicator, size: int) -> list[Rival]:
    wanted = torch.cat([_input(rank, size).chunk(comm.ranks)[comm.rank] for rank in range(comm.ranks)])
    return _rivals(comm, _input(comm.rank, size), wanted, dist.all_to_all_single, comm.all_to_all_single)


def all_reduce(comm: Communicator, size: int) -> list[Rival]:
    """In place, as torch has it; of zeros, which stay what they are however often they are summed."""
    xs = {GLOO: torch.zeros(size // 4), OURS: torch.zeros(size // 4), GRANTED: comm.empty((size // 4,)).zero_()}
    rivals = []
    for name, x in xs.items():
        call: Callable[[Tensor], object] = dist.all_reduce if name == GLOO else comm.all_reduce
        rivals.append(Rival(name, partial(call, x), partial(_reduces, call, x, comm)))
    return rivals


def _rivals(
    comm: Communicator,
    x: Tensor,
    wanted: Tensor,
    gloo: Callable[[Tensor, Tensor], object],
    ours: Callable[[Tensor, Tensor], object],
    *,
    lends: bool = False,
) -> list[Rival]:
    """Each into an output of its own. `lends`: peers read inputs, rather than write outputs."""
    outs = {GLOO: torch.zeros_like(wanted), OURS: torch.zeros_like(wanted), GRANTED: torch.zeros_like(wanted)}
    xs = dict.fromkeys(outs, x)
    if lends:
        xs[GRANTED] = comm.empty(x.shape).copy_(x)
    else:
        outs[GRANTED] = comm.empty(wanted.shape)
    calls = {GLOO: gloo, OURS: ours, GRANTED: ours}
    return [Rival(n, partial(calls[n], out, xs[n]), partial(torch.allclose, out, wanted)) for n, out in outs.items()]


def _of_torch(*names: str) -> Callable[[Tensor, Tensor], object]:
    """torch 2.13 gave some collectives new names, and warns of the old ones."""
    found: Callable[[Tensor, Tensor], object] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return found


def _input(rank: int, size: int) -> Tensor:
    return torch.randn(size // 4, generator=torch.Generator().manual_seed(rank))


def _total(ranks: int, size: int) -> Tensor:
    return torch.stack([_input(rank, size) for rank in range(ranks)]).sum(0)


def _reduces(call: Callable[[Tensor], object], x: Tensor, comm: Communicator) -> bool:
    """A call of its own on known values; then there are zeros again."""
    x.copy_(_input(comm.rank, 4 * x.numel()))
    call(x)
    right = torch.allclose(x, _total(comm.ranks, 4 * x.numel()))
    x.zero_()
    return right


OPS = {op.__name__: op for op in (all_gather, reduce_scatter, all_reduce, all_to_all)}


# ---- how it is timed -------------------------------------------------------------------------------------------------


def measure(rivals: Sequence[Rival], rounds: int) -> dict[str, list[float]]:
    """Microseconds a call on this rank, a number a round. Every rank makes the same number of calls in the same order."""
    counts = {rival.name: _calls_a_round(rival) for rival in rivals}
    times: dict[str, list[float]] = {rival.name: [] for rival in rivals}
    for turn in range(rounds):
        for rival in [*rivals[turn % len(rivals) :], *rivals[: turn % len(rivals)]]:
            dist.barrier()
            times[rival.name].append(_time(rival.call, counts[rival.name]))
    return times


def _calls_a_round(rival: Rival) -> int:
    """As many as the slowest rank makes in a round's turn; after a few to warm up."""
    _time(rival.call, 3)
    took = torch.tensor(_time(rival.call, 3))
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return max(1, min(200, int(ROUND_S * 1e6 / took.item())))


def _time(call: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count * 1e6


def rows_of(op: str, size: int, comm: Communicator, rounds: int) -> list[Row]:
    rivals = OPS[op](comm, size)
    _check(op, size, rivals)
    times = measure(rivals, rounds)
    _check(op, size, rivals)
    slowest = {name: _slowest(mine, comm.ranks) for name, mine in times.items()}
    gloo = slowest[GLOO]
    return [_row(op, size, name, each, gloo) for name, each in slowest.items()]


def _check(op: str, size: int, rivals: Sequence[Rival]) -> None:
    for rival in rivals:
        rival.call()
        if not rival.right():
            raise SystemExit(
                f"bench_collectives: {op} of {size} bytes by {rival.name} is wrong on rank {dist.get_rank()}"
            )


def _slowest(mine: list[float], ranks: int) -> list[float]:
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, mine)
    return [max(each) for each in zip(*everyone, strict=True)]


def _row(op: str, size: int, name: str, times: Sequence[float], gloo: Sequence[float]) -> Row:
    median, quarters = statistics.median(times), statistics.quantiles(times, n=4)
    ratios = statistics.median(gloo) / median, min(gloo) / min(times)
    return Row(op, size, name, len(times), median, min(times), (quarters[0], quarters[2]), *ratios)


# ---- ranks, and what they report -------------------------------------------------------------------------------------


def start_ranks(job: Job) -> None:
    """Every rank a process; when one fails, the others learn of it from their communicator."""
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=rank_of, args=(rank, job)) for rank in range(job.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("bench_collectives: a rank failed")


def rank_of(rank: int, job: Job) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job.folder}/gloo", rank=rank, world_size=job.ranks)
    heap = 2 * job.ranks * max(job.sizes) + MIB
    with Communicator(timeout=TIMEOUT_S, heap_bytes=heap) as comm:
        rows = []
        for op in job.ops:
            for size in job.sizes:
                rows += rows_of(op, size, comm, job.rounds)
                if rank == 0:
                    _print(rows[-1 - (rows[-1].rival == GRANTED) :])
        if rank == 0:
            Path(job.folder, "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


def _print(rows: Sequence[Row]) -> None:
    for row in rows:
        low, high = row.quarter_us
        gloo_us, gloo_min_us = row.median_us * row.times_gloo, row.min_us * row.times_gloo_min
        print(
            f"{row.op:15} {row.bytes:>9} {row.rival:16} {row.median_us:>10.1f} {row.min_us:>10.1f} {low:>10.1f} {high:>9.1f}"
            f" {gloo_us:>10.1f} {gloo_min_us:>9.1f} {row.times_gloo:>7.1f} {row.times_gloo_min:>7.1f}",
            flush=True,
        )


def main(arguments: Sequence[str]) -> int:
    job, report = _parse(arguments)
    print(
        f"{'':42} {'median us':>10} {'min us':>10} {'25 %':>10} {'75 %':>9} {'gloo med.':>10} {'gloo min':>9} {'x med.':>7} {'x min':>7}"
    )
    with tempfile.TemporaryDirectory() as folder:
        job = Job(job.ranks, job.ops, job.sizes, job.rounds, folder)
        start_ranks(job)
        rows = json.loads(Path(folder, "rows.json").read_text())
    if report:
        machine = {"cores": os.cpu_count(), "torch": torch.__version__, "ranks": job.ranks, "load": os.getloadavg()[0]}
        Path(report).parent.mkdir(parents=True, exist_ok=True)
        Path(report).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    return 0


def _parse(arguments: Sequence[str]) -> tuple[Job, str]:
    parser = argparse.ArgumentParser(
        prog="bench_collectives.py", description=f"{__doc__} With --device cuda: on GPUs, see there."
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument(
        "--bytes", nargs="+", type=int, default=list(SIZES), help="of a rank's input; divisible by 4 x ranks"
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", default="", metavar="FILE", help="write rows and machine there too")
    given = parser.parse_args(arguments)
    if given.rounds < 2 or any(size < 1 or size % (4 * given.ranks) for size in given.bytes):
        parser.error(f"needs 2 rounds or more and bytes divisible by {4 * given.ranks}")
    return Job(given.ranks, tuple(given.op), tuple(given.bytes), given.rounds, ""), given.json
