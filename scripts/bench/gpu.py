"""The sweep over GPUs: every case, every rival, a row on the screen and a line on record."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench import record, rivals
from bench.cases import COLLECTIVES, SHAPES, UNEVEN, UNEVEN_PART, Case, collective, fits, shape
from bench.measure import Entry, Rotation, Times, line, measure, rotations
from bench.worlds import Force, World, local_world, process_world

KIB, MIB = 1 << 10, 1 << 20
# A factor of four apart, those that are 4 KiB, 64 KiB, 1 MiB and 7 MiB each way on two ranks between them.
SIZES = tuple(KIB * k for k in (1, 8, 16, 64, 128, 256, 1024, 2048, 4096, 14336, 16384, 65536, 262144))
QUICK = tuple(KIB * k for k in (1, 8, 128, 2048, 14336, 262144))
ODD_SHARES = (167, 25_001, 1_750_003)  # elements a rank
UNEVEN_SIZES = (64 * KIB, MIB, 64 * MIB)
UNEVEN_QUICK = (MIB,)
EAGER_SIZES = (KIB, 64 * KIB, MIB)
IN_PLACE = {
    "all_gather": (False, True),
    "reduce_scatter": (False, True),
    "all_reduce": (False, True),
    "all_to_all": (False,),
    **dict.fromkeys(UNEVEN, (False,)),
}


@dataclass(frozen=True)
class Job:
    cases: tuple[Case, ...]
    forces: tuple[Force, ...]
    rounds: int
    record: Path | None
    commit: str


def main(arguments: Sequence[str]) -> int:
    given = _parse(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("bench_collectives: --device cuda needs a GPU that torch can use; there is none here")
    launched = "RANK" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if launched else len(given.devices) if len(given.devices) > 1 else given.ranks
    job = _job(given, ranks)
    room = room_bytes(job.cases, 1 if launched else ranks)
    if launched:
        world = process_world(heap_bytes=room, window_bytes=room)
    else:
        world = local_world(ranks, given.devices, heap_bytes=room, fused=not given.unfused)
    failed = sweep(job, world, record.run_of(gpus(world), versions(), commit=job.commit))
    world.shut()
    return int(failed)


def sweep(job: Job, world: World, run: record.Run) -> bool:
    """Whether ours failed somewhere."""
    failed = False
    seen: set[tuple[str, bool]] = set()
    l2_bytes = torch.cuda.get_device_properties(world.lanes[0].device).L2_cache_size
    for case in job.cases:
        subject = case.collective, case.in_place
        for rotation, mode in _turns(case, world, l2_bytes):
            failed |= _turn(job, world, run, case, rotation, mode, first=subject not in seen)
            seen.add(subject)
    return failed


def _turn(job: Job, world: World, run: record.Run, case: Case, rotation: Rotation, mode: str, *, first: bool) -> bool:
    """One row. Rivals that cannot run are put on record once a collective; the buffers of all are gone when this returns."""
    times = measure(case, world, entries_of(case, world, job.forces), rotation, rounds=job.rounds, mode=mode)
    ours = [each for each in times if each.entry.provider in rivals.OURS and not each.why.startswith(rivals.RUNS_AS)]
    if world.root:
        print(row_of(case, rotation, mode, times), flush=True)
        if job.record:
            kept = [each for each in times if each.us or each in ours or (first and not each.entry.forced)]
            record.append(job.record, [line(run, world, case, rotation, each, mode) for each in kept])
    return any(each.why for each in ours)


def _turns(case: Case, world: World, l2_bytes: int) -> Iterator[tuple[Rotation, str]]:
    found = rotations(case, world, l2_bytes)
    yield from ((rotation, "graph") for rotation in found)
    if case.bytes in EAGER_SIZES and case.collective not in SHAPES:
        yield found[-1], "eager"


def entries_of(case: Case, world: World, forces: Sequence[Force]) -> list[Entry]:
    """Ours, every rival whether it can run here or not, and the yardsticks."""
    grants = (False, True)
    ours = [Entry("purlin", partial(rivals.purlin, granted=granted), granted) for granted in grants]
    for force in forces:
        make = partial(rivals.purlin, granted=force.granted, force=force)
        ours.append(Entry("purlin", make, force.granted, forced=True))
    if case.uneven:
        ours += [Entry("purlin_even", partial(rivals.purlin_even, granted=granted), granted) for granted in grants]
    theirs = [Entry("nccl", rivals.nccl), Entry("nccl_symmetric", rivals.nccl_symmetric, True)]
    if case.collective == "all_reduce":
        shots = "two" if case.in_place else "one"
        theirs.append(Entry("torch_symm_mem", partial(rivals.torch_symm_mem, shots=shots), True))
    yardsticks = [Entry("torch_copy", rivals.torch_copy), Entry("purlin_copy", rivals.purlin_copy)]
    if case.collective in SHAPES:
        yardsticks.append(Entry("torch_relayout", rivals.torch_relayout))
    return ours + theirs + (yardsticks if world.name == "local" else [])


def row_of(case: Case, rotation: Rotation, mode: str, times: Sequence[Times]) -> str:
    """One line a case: microseconds of every rival that ran, and why ours did not."""
    cells = [
        _cell(each) for each in times if each.us or each.entry.provider in rivals.OURS or each.why.startswith("wrong")
    ]
    place = "in place" if case.in_place else "apart"
    heat = "eager" if mode == "eager" else "hot" if rotation.hot else "cold"
    return f"{case.collective:22} {case.bytes:>10} {place:8} {heat:5} | " + " | ".join(cells)


def _cell(times: Times) -> str:
    rival = times.rival
    name = times.entry.provider + "!" * times.entry.forced + "+" * times.entry.registered
    if rival is None or not times.us:
        return f"{name} {times.why}"
    how = f" {rival.regime}{f':{rival.ctas}' if rival.ctas else ''}" if rival.regime else ""
    return f"{name}{how} {sorted(times.us)[len(times.us) // 2]:.2f}"


# ---- what is asked for -----------------------------------------------------------------------------------------------


def _job(given: argparse.Namespace, ranks: int) -> Job:
    dtype = getattr(torch, given.dtype)
    unit = ranks * dtype.itemsize
    _check(given, unit)
    cases = [
        collective(name, ranks, size, dtype, in_place=in_place)
        for name in given.op
        for in_place in IN_PLACE[name]
        for size in given.bytes or sizes_of(name, unit, quick=given.quick)
    ]
    cases += [shape(name, ranks) for name in given.shape if fits(name, ranks)]
    return Job(tuple(cases), tuple(given.force), given.rounds or (5 if given.quick else 9), given.record, given.commit)


def _check(given: argparse.Namespace, unit: int) -> None:
    sizes = given.bytes or ()
    if any(size < 1 or size % unit for size in sizes):
        raise SystemExit(f"bench_collectives: needs bytes divisible by {unit}")
    if not set(UNEVEN).isdisjoint(given.op) and any(size < UNEVEN_PART * unit for size in sizes):
        raise SystemExit(
            f"bench_collectives: uneven shares need {UNEVEN_PART * unit} bytes or more; pass --op of others"
        )


def sizes_of(name: str, unit: int, *, quick: bool) -> list[int]:
    """Bytes of the sweep, multiples of `unit`; those of odd shares last."""
    if name in UNEVEN:
        return sorted({-(-size // unit) * unit for size in (UNEVEN_QUICK if quick else UNEVEN_SIZES)})
    plain = sorted({-(-size // unit) * unit for size in (QUICK if quick else SIZES)})
    return plain + [share * unit for share in ODD_SHARES[: 1 if quick else None]]


def room_bytes(cases: Sequence[Case], sharing: int) -> int:
    """For the buffers of any rotation: 1.5 times an L2 cache of 128 MiB at most, or two sets; twice that where even shares lie beside uneven ones."""
    rotating = 192 * MIB // sharing + 640 * 8 * KIB
    return max((2 * case.touched_bytes + rotating) * (1 + case.uneven) for case in cases)


def gpus(world: World) -> str:
    count = len({lane.device for lane in world.lanes}) if world.name == "local" else world.ranks
    return f"{count} x {torch.cuda.get_device_name(world.lanes[0].device)}"


def versions() -> dict[str, str]:
    import importlib.metadata

    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "driver": driver()}
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    try:
        found["purlin"] = importlib.metadata.version("purlin-diffusion")
    except importlib.metadata.PackageNotFoundError:
        found["purlin"] = "not installed"
    return found


def driver() -> str:
    """Of the GPUs, as the kernel module says it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return "unknown"
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), "unknown")


def _force(text: str) -> Force:
    try:
        return Force.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_collectives.py --device cuda", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="threads of one process; torchrun says it itself")
    parser.add_argument("--devices", nargs="+", default=["cuda:0"], help="one for all ranks, or one a rank")
    parser.add_argument("--unfused", action="store_true", help="ranks of one device on streams of their own")
    parser.add_argument("--op", nargs="*", choices=(*COLLECTIVES, *UNEVEN), default=[*COLLECTIVES, *UNEVEN])
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--bytes", nargs="+", type=int, help="of the whole message: an all-gather's output, the others' input"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--force", nargs="+", type=_force, default=[], metavar="REGIME:CTAS", help="ours once more so")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few sizes, five rounds")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help=f"append JSON lines, as {record.RECORD.relative_to(record.ROOT)}"
    )
    parser.add_argument("--commit", default="", help="for the record, where git cannot say")
    return parser.parse_args(arguments)
