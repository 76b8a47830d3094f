"""On the root: what all ranks saw, a row a mode."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from purlin_diffusion.commands.options import Options
from purlin_diffusion.commands.timing.likeness import Likeness
from purlin_diffusion.commands.timing.measure import Visit
from purlin_diffusion.commands.timing.modes import Asked, Mode, modes
from purlin_diffusion.commands.timing.profile import Profile


@dataclass(frozen=True)
class Spread:
    """Of a few repeats."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def text(self, unit_s: float, unit: str = "") -> str:
        median, least, most = (f"{value / unit_s:.1f}" for value in (self.median, self.least, self.most))
        return f"{median} ({least} to {most}) {unit}".rstrip()


@dataclass(frozen=True)
class Row:
    """One mode. `speedup`: the best eager one-rank median over this one's.

    `memory_gb`: of the rank that held most; of its repeats the least, for copies that were made for other modes meanwhile are in the later ones.

    `likeness` is the worst of all repeats. Nothing but `cannot` where the mode could not run.
    """

    mode: Mode
    whole_s: Spread | None = None
    step_s: Spread | None = None
    images_per_s: float | None = None
    speedup: float | None = None
    memory_gb: float | None = None
    likeness: Likeness | None = None
    profile: Profile | None = None
    picture: bytes | None = None
    cannot: str = ""


@dataclass(frozen=True)
class Result:
    """One run of `latency`. `visits`: [process][visit]."""

    options: Options
    asked: Asked
    rows: tuple[Row, ...]
    visits: tuple[tuple[Visit, ...], ...]

    @property
    def measured(self) -> list[Row]:
        return [each for each in self.rows if each.whole_s]

    def best(self, *kinds: str) -> Row | None:
        """The fastest to one picture among modes of these kinds."""
        return min((row for row in self.measured if row.mode.kind in kinds), key=median, default=None)


def least_memory(of_rank: Sequence[Visit]) -> float | None:
    return min((visit.memory_gb for visit in of_rank if visit.memory_gb is not None), default=None)


def median(row: Row) -> float:
    return row.whole_s.median if row.whole_s else float("inf")


def summarize(options: Options, asked: Asked, visits: Sequence[Sequence[Visit]]) -> Result:
    met = {visit.mode for visit in visits[0]}
    every = [mode for mode in modes(options) if mode in met]
    rows = [row(mode, [[v for v in of_rank if v.mode == mode] for of_rank in visits]) for mode in every]
    alone = min((median(each) for each in rows if each.mode.kind == "alone" and each.mode.how == "eager"), default=0)
    rows = [replace(each, speedup=alone / median(each)) if each.whole_s and 0 < alone < 1e9 else each for each in rows]
    return Result(options, asked, tuple(rows), tuple(map(tuple, visits)))


def row(mode: Mode, visits: Sequence[Sequence[Visit]]) -> Row:
    """`visits`: [process][visit] of one mode. A repeat took as long as its slowest rank."""
    every = [visit for of_rank in visits for visit in of_rank]
    if cannot := next((visit.cannot for visit in every if visit.cannot), ""):
        return Row(mode, cannot=cannot)
    repeats = [[visit for visit in repeat if visit.seconds] for repeat in zip(*visits, strict=True)]
    timed = [[(visit.seconds, visit.images) for visit in repeat if visit.seconds] for repeat in repeats if repeat]
    whole = Spread.of([max(seconds.whole for seconds, _ in repeat) for repeat in timed])
    steps = [max(seconds.step for seconds, _ in repeat if seconds.step) for repeat in timed if repeat[0][0].step]
    return Row(
        mode,
        whole_s=whole,
        step_s=Spread.of(steps) if steps else None,
        images_per_s=timed[0][0][1] / whole.median,
        memory_gb=max(filter(None, map(least_memory, visits)), default=None),
        likeness=max((v.likeness for v in every if v.likeness), key=lambda each: each.max_abs, default=None),
        profile=next((visit.profile for visit in every if visit.profile), None),
        picture=next((visit.picture for visit in every if visit.picture), None),
    )
