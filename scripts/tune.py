"""Measure which regime and how many teams are fastest on this GPU, and write the table that purlin_core goes by.

    python scripts/tune.py --ranks 2 [--quick] [--out FILE]                    ranks are threads of one process on one GPU, one launch a call
    torchrun --nproc-per-node 2 scripts/tune.py [--quick] [--out FILE]         ranks are processes, a GPU each

For each collective and size every regime and team count that can run is first compared with what must come of it, then timed by graph replay, all in
turn. Without --out the table goes to purlin_core/tables/. Rows of other rank counts that stand in the file already are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

# Before torch is imported. Multicast stays off: it can put a host's GPUs out of service.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

import torch
from bench import gpu, record, rivals
from bench.cases import COLLECTIVES, Case, collective
from bench.measure import Entry, Times, measure, rotations
from bench.worlds import Force, World, local_world, process_world

from purlin_core.tune import CUDA_PACKET_BYTES, TABLES, Regime, cuda_scratch, most_teams, read_table, slug

MOST_BYTES = 256 << 20  # of a whole message
LARGE_BYTES = 4 << 20  # from here on buffers rotate beyond the L2 cache
TIE = 1.02  # of two schedules no further apart, the one with fewer teams is taken
TEAM_BYTES = {Regime.PACKET: 256, Regime.STAGED: 1024, Regime.DIRECT: 1024}  # with less for each, more teams cannot pay
MOST_TEAM_BYTES = {Regime.PACKET: 64 << 10, Regime.STAGED: 4 << 20, Regime.DIRECT: 4 << 20}  # with more, fewer cannot

Row = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    given = _parse(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("tune: needs a GPU that torch can use; there is none here")
    launched = "RANK" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if launched else given.ranks
    sizes = sizes_of(ranks, given.quick)
    room = gpu.room_bytes([case_of(name, ranks, sizes[-1]) for name in given.op], 1 if launched else ranks)
    make = partial(process_world, window_bytes=0) if launched else partial(local_world, ranks, ["cuda:0"])
    world = make(heap_bytes=room)
    rows = [row for name in given.op for row in rows_of(name, world, sizes, given.rounds or (5 if given.quick else 9))]
    if world.root:
        name = torch.cuda.get_device_name(world.lanes[0].device)
        path = given.out or TABLES / f"{slug(name)}.json"
        write(path, name, rows, given.commit)
        print(f"{len(rows)} rows in {path}")
    world.shut()
    return 0


def rows_of(name: str, world: World, sizes: Sequence[int], rounds: int) -> list[Row]:
    """The rows of one collective, for tensors that can be granted or lent and for others."""
    best: dict[Any, list[tuple[int, Force]]] = {}
    for size in sizes:
        medians = medians_of(name, world, size, rounds)
        for granted in (False, True):
            able = {force: us for force, us in medians.items() if granted or not force.granted}
            if able:
                best.setdefault(granted, []).append((largest_of(name, world.ranks, size), winner(able)))
    return [row for granted, chosen in best.items() for row in merged(name, world.ranks, granted, chosen)]


def medians_of(name: str, world: World, size: int, rounds: int) -> dict[Force, float]:
    """Of every schedule that ran and was right."""
    case = case_of(name, world.ranks, size)
    forces = candidates(largest_of(name, world.ranks, size), world.ranks)
    found = rotations(case, world, torch.cuda.get_device_properties(world.lanes[0].device).L2_cache_size)
    rotation = found[0] if size >= LARGE_BYTES else found[-1]
    times = measure(case, world, [entry_of(force) for force in forces], rotation, rounds=rounds)
    medians = {force: statistics.median(each.us) for force, each in zip(forces, times, strict=True) if each.us}
    if world.root:
        ranked = sorted(medians.items(), key=lambda item: item[1])
        print(f"{name:15} {size:>10} | " + " | ".join(f"{force} {us:.2f}" for force, us in ranked[:6]), flush=True)
        _complain(name, size, forces, times)
    return medians


def largest_of(name: str, ranks: int, size: int) -> int:
    """The largest message of one rank to another, as choose() sees it: an all-reduce in one exchange."""
    return size if name == "all_reduce" else size // ranks


def _complain(name: str, size: int, forces: Sequence[Force], times: Sequence[Times]) -> None:
    for force, each in zip(forces, times, strict=True):
        if each.why and not each.why.startswith(rivals.RUNS_AS):
            print(f"{name:15} {size:>10} | {force} left out: {each.why}", flush=True)


def case_of(name: str, ranks: int, size: int) -> Case:
    return collective(name, ranks, size, torch.bfloat16, in_place=name == "all_reduce")


def entry_of(force: Force) -> Entry:
    return Entry("purlin", partial(rivals.purlin, granted=force.granted, force=force), force.granted, forced=True)


def candidates(largest: int, ranks: int) -> list[Force]:
    """Regimes and team counts worth a try for a message of `largest` bytes."""
    scratch = cuda_scratch(ranks)
    counts = [1 << k for k in range(most_teams(ranks).bit_length())]
    found = []
    for regime in (Regime.PACKET, Regime.STAGED, Regime.DIRECT):
        for teams in counts:
            fits = regime is not Regime.PACKET or largest <= min(CUDA_PACKET_BYTES, teams * scratch.window_bytes)
            enough = teams == 1 or largest // teams >= TEAM_BYTES[regime]
            if fits and enough and largest // teams <= MOST_TEAM_BYTES[regime]:
                found.append(Force(regime, teams))
    return found


def winner(medians: Mapping[Force, float]) -> Force:
    """The fewest teams of those that tie with the fastest."""
    fastest = min(medians.values())
    tied = [force for force, us in medians.items() if us <= TIE * fastest]
    return min(tied, key=lambda force: (force.teams, medians[force]))


def merged(name: str, ranks: int, granted: Any, chosen: Sequence[tuple[int, Force]]) -> list[Row]:
    """A row for each run of sizes with one winner; it ends halfway (by ratio) to the next size, or where it cannot run; the last never."""
    rows = []
    place = 0
    for force, run in groupby(chosen, key=lambda item: item[1]):
        place += len(list(run))
        bound: Any = "*" if place == len(chosen) else int((chosen[place - 1][0] * chosen[place][0]) ** 0.5) // 16 * 16
        if bound != "*" and force.regime is Regime.PACKET:
            bound = min(bound, CUDA_PACKET_BYTES)
        lag = cuda_scratch(ranks).slots // 2 if force.regime is Regime.STAGED else 0
        row = {"name": name, "ranks": ranks, "granted": granted, "up_to_bytes": bound}
        rows.append({**row, "regime": force.regime.name.lower(), "teams": force.teams, "lag": lag})
    return rows


def write(path: Path, name: str, rows: Sequence[Row], commit: str) -> None:
    """The rows, and those for other rank counts that the file holds; and read it once, as a communicator will."""
    counts = {row["ranks"] for row in rows}
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    run = record.run_of(name, gpu.versions(), commit=commit)
    head = {"gpu": name, "date": run.date, "commit": run.commit, "versions": run.versions}
    kept = [row for row in old if row["ranks"] not in counts]
    text = ",\n".join(f"  {json.dumps(row)}" for row in sorted([*kept, *rows], key=lambda row: str(row["ranks"])))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{text}\n ]\n}}\n')
    read_table(path, gpu=name)


def sizes_of(ranks: int, quick: bool) -> list[int]:
    """Whole messages from 512 bytes a rank on."""
    sizes = [512 * ranks]
    while sizes[-1] * 2 <= MOST_BYTES:
        sizes.append(sizes[-1] * (4 if quick else 2))
    return [size for size in sizes if size <= MOST_BYTES]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="threads of one process; torchrun says it itself")
    parser.add_argument("--op", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES))
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="half the sizes, five rounds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: the table of this GPU in purlin_core/tables")
    parser.add_argument("--commit", default="", help="for the table, where git cannot say")
    given = parser.parse_args(arguments)
    if given.ranks < 2:
        parser.error("needs 2 ranks or more")
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
