"""Time a picture: one rank against several, purlin against torch.distributed, in one run and with the repeats interleaved.

Every visit to a mode makes the pipeline parallel anew, draws `--warmup` pictures that do not count and one that does, so that no mode owns the quiet
half of the run. A time is that of the slowest rank; a mode that cannot run is a row that says why.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from purlin_diffusion.commands.exits import DONE, ended
from purlin_diffusion.commands.machine import cores, versions
from purlin_diffusion.commands.options import (
    Options,
    add_model_arguments,
    check_count,
    check_writable,
    read_options,
)
from purlin_diffusion.commands.picture import Seconds, call, call_arguments, load
from purlin_diffusion.commands.ranks import here, on_ranks, parallel, place, places, sharing

BACKENDS = ("purlin", "torch")


@dataclass(frozen=True)
class Visit:
    """One rank's timed call in one mode; no seconds on a rank that had no part in it.

    `difference`: on the root, of its image from the one-rank one, max abs of values in 0..1.
    """

    mode: str
    seconds: Seconds | None = None
    difference: float | None = None
    cannot: str = ""


@dataclass(frozen=True)
class Spread:
    """Of a few repeats."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def text(self, unit_s: float, unit: str) -> str:
        median, least, most = (f"{value / unit_s:.1f}" for value in (self.median, self.least, self.most))
        return f"{median} ({least} to {most}) {unit}"


@dataclass(frozen=True)
class Row:
    """One mode. `speedup` is the best one-rank median over this one's; `difference` the largest over repeats."""

    mode: str
    ranks: int
    whole_s: Spread | None
    step_s: Spread | None
    speedup: float | None
    difference: float | None
    cannot: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each mode (default: 5)")
    parser.add_argument("--warmup", type=int, default=1, help="calls before each timed one (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows, every repeat and the machine there")


def run(args: argparse.Namespace) -> int:
    return ended("latency", lambda: latency(args))


def latency(args: argparse.Namespace) -> int:
    """Raises InputError before any rank starts, and what a rank raised."""
    check_count("--repeats", args.repeats)
    check_count("--warmup", args.warmup)
    if args.json:
        check_writable("--json", args.json)
    options = read_options(args)
    visits = on_ranks(measure, options, args.repeats, args.warmup)
    if visits:
        rows = summarize(options, visits)
        print(f"{headline(options, args.repeats, args.warmup)}\n\n{table(rows)}")
        if args.json:
            args.json.write_text(json.dumps(record(options, args, visits, rows), indent=2) + "\n")
    return DONE


# ---- on every rank ---------------------------------------------------------------------------------------------------
def measure(options: Options, repeats: int, warmup: int) -> list[Visit]:
    """All visits of this rank, in the order in which they were made."""
    logging.getLogger("purlin_diffusion").setLevel(logging.ERROR)  # the table says which route each row took
    pipe = load(options, place(options))
    pipe.set_progress_bar_config(disable=True)
    visits: list[Visit] = []
    for _ in range(repeats):
        reference: Any = None
        for threads in alone_threads(options):
            visit, reference = visit_alone(pipe, options, threads, warmup=warmup)
            visits.append(visit)
        for backend in BACKENDS if options.ranks > 1 else ():
            visits.append(visit_together(pipe, options, backend, warmup=warmup, reference=reference))
    return visits


def alone_threads(options: Options) -> list[int | None]:
    """How many threads one rank is timed with on a CPU: as many as one of several has, and all cores. The better one is the rival.

    None: as many as it has, on a GPU.
    """
    return [*sorted({max(1, cores() // options.ranks), cores()})] if place(options) == "cpu" else [None]


def visit_alone(pipe: Any, options: Options, threads: int | None, *, warmup: int) -> tuple[Visit, Any]:
    """The root draws while the others wait. Returns its image too."""
    from purlin_diffusion.workers import intra_op_threads

    how = f", {threads} thread{'s' * (threads > 1)}" if threads else ""
    visit, image = Visit(f"1 rank{how}"), None
    if here(options) == 0:
        with intra_op_threads(threads):
            image, seconds = draw(pipe, options, warmup=warmup)
        visit = replace(visit, seconds=seconds)
    meet(options)
    return visit, image


def visit_together(pipe: Any, options: Options, backend: str, *, warmup: int, reference: Any) -> Visit:
    """All ranks draw. An error of ours, which all ranks meet alike, makes a visit that says so."""
    from purlin_core.errors import PurlinError

    try:
        with parallel(pipe, options, backend=backend):
            image, seconds = draw(pipe, options, warmup=warmup, together=True)
    except PurlinError as error:
        return Visit(backend, cannot=str(error))
    return Visit(backend, seconds, None if reference is None else float(abs(image - reference).max()))


def draw(pipe: Any, options: Options, *, warmup: int, together: bool = False) -> tuple[Any, Seconds]:
    """The last of `warmup` + 1 calls: b x h x w x 3 in 0..1, and its seconds."""
    arguments = call_arguments(options)
    for _ in range(warmup):
        call(pipe, arguments, seed=options.seed, output="np")
    if together:
        meet(options)
    return call(pipe, arguments, seed=options.seed, output="np")


def meet(options: Options) -> None:
    """Wait until every process is here."""
    import torch.distributed as dist

    if options.mode in {"processes", "launched"}:
        dist.barrier()


# ---- on the root -----------------------------------------------------------------------------------------------------
def summarize(options: Options, visits: Sequence[Sequence[Visit]]) -> list[Row]:
    """A row a mode, of what all ranks saw."""
    modes = list(dict.fromkeys(visit.mode for visit in visits[0]))
    rows = [row(options, mode, [[v for v in of_rank if v.mode == mode] for of_rank in visits]) for mode in modes]
    alone = min(each.whole_s.median for each in rows if each.ranks == 1 and each.whole_s)
    return [replace(each, speedup=alone / each.whole_s.median if each.whole_s else None) for each in rows]


def row(options: Options, mode: str, visits: Sequence[Sequence[Visit]]) -> Row:
    """`visits`: [rank][repeat]. A repeat took as long as its slowest rank."""
    ranks = options.ranks if mode in BACKENDS else 1
    cannot = next((visit.cannot for of_rank in visits for visit in of_rank if visit.cannot), "")
    if cannot:
        return Row(mode, ranks, None, None, None, None, cannot)
    repeats = [[visit.seconds for visit in repeat if visit.seconds] for repeat in zip(*visits, strict=True)]
    differences = [visit.difference for of_rank in visits for visit in of_rank if visit.difference is not None]
    steps = [
        max(seconds.step for seconds in repeat if seconds.step is not None) for repeat in repeats if repeat[0].step
    ]
    return Row(
        mode,
        ranks,
        whole_s=Spread.of([max(seconds.whole for seconds in repeat) for repeat in repeats]),
        step_s=Spread.of(steps) if steps else None,
        speedup=None,
        difference=max(differences, default=None),
    )


def headline(options: Options, repeats: int, warmup: int) -> str:
    arguments = {name: value for name, value in call_arguments(options).items() if name != "prompt"}
    said = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    how = "threads of one process" if options.mode == "threads" else "processes"
    where = ", ".join(dict.fromkeys(places(options)))
    shared = f"{sharing(options)}\n" if sharing(options) else ""
    return (
        f"{options.model} ({said or 'defaults of the pipeline'}), {options.ranks} {how} on {where}, attention {options.attention}\n"
        f"{shared}"
        f"{repeats} repeats, interleaved, each after {warmup} warm-up; times: median (least to most), of the slowest rank;"
        f" speed-up: over the best of 1 rank; {cores()} cores, shared by the ranks"
    )


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| mode | ranks | whole call | step | speed-up | max abs difference from 1 rank |",
        "|---|---|---|---|---|---|",
    ]
    for each in rows:
        if each.whole_s is None:
            lines.append(f"| {each.mode} | {each.ranks} | cannot run: {each.cannot} | | | |")
            continue
        step = each.step_s.text(1e-3, "ms") if each.step_s else "one step only"
        difference = f"{each.difference:.1e}" if each.difference is not None else ""
        lines.append(
            f"| {each.mode} | {each.ranks} | {each.whole_s.text(1e-3, 'ms')} | {step} | {each.speedup:.2f}x | {difference} |"
        )
    return "\n".join(lines)


def record(options: Options, args: argparse.Namespace, visits: Any, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "options": asdict(options),
        "arguments": call_arguments(options),
        "repeats": args.repeats,
        "warmup": args.warmup,
        "rows": [asdict(each) for each in rows],
        "visits_by_rank": [[asdict(visit) for visit in of_rank] for of_rank in visits],
        "versions": versions(),
        "cores": cores(),
    }
