"""On the root: what all ranks saw, a row a mode."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from purlin_diffusion.commands.options import Options
from purlin_diffusion.commands.timing.likeness import Likeness
from purlin_diffusion.commands.timing.modes import Asked, Mode, cannot, modes
from purlin_diffusion.commands.timing.profile import Profile
from purlin_diffusion.commands.timing.truth import MOST, Error
from purlin_diffusion.commands.timing.visit import DEFECT, Graphs, Visit
from purlin_diffusion.commands.timing.warmth import Warmth, Warmths
from purlin_diffusion.commands.timing.watch import Host

NOT_REACHED = "not reached: the run ended before"


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

    `memory_gb`: of the rank that held most. `likeness` and `error` are the worst of all repeats; `over_one`: the error of a denoiser call, and of the
    picture, over that of one rank, eager. `note`: why it was timed but could not be watched. Nothing but `cannot` where the mode could not run.
    """

    mode: Mode
    repeats: int = 0  # timed: fewer than were asked for where a run was ended
    whole_s: Spread | None = None
    step_s: Spread | None = None
    decode_s: Spread | None = None
    images_per_s: float | None = None
    speedup: float | None = None
    memory_gb: float | None = None
    warmth: tuple[tuple[Warmth, ...], ...] = ()  # [repeat][GPU], by rank
    likeness: Likeness | None = None
    error: Error | None = None
    over_one: tuple[float, float] | None = None
    graphs: Graphs | None = None
    host: Host | None = None
    profile: Profile | None = None
    picture: bytes | None = None
    cannot: str = ""
    note: str = ""

    @property
    def true(self) -> bool | None:
        """Whether its error is within what one rank's allows; None where that is not known."""
        return max(self.over_one) <= MOST if self.over_one else None


def new_run() -> str:
    """A name for a run, which no other has."""
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True)
class Result:
    """One size of a run of `latency`. `visits`: [process][visit]. `run`: the same in all that is written of it."""

    options: Options
    asked: Asked
    rows: tuple[Row, ...]
    visits: tuple[tuple[Visit, ...], ...]
    run: str = field(default_factory=new_run)

    @property
    def measured(self) -> list[Row]:
        return [each for each in self.rows if each.whole_s]

    @property
    def warmth(self) -> dict[str, Warmths]:
        """Of the modes that were measured, by their titles."""
        return {row.mode.title: row.warmth for row in self.measured}

    @property
    def sound(self) -> bool:
        """Whether no row stands for a defect of ours."""
        return not any(why.startswith(DEFECT) for row in self.rows for why in (row.cannot, row.note))

    def best(self, *kinds: str) -> Row | None:
        """The fastest to one picture among modes of these kinds."""
        return min((row for row in self.measured if row.mode.kind in kinds), key=median, default=None)


def median(row: Row) -> float:
    return row.whole_s.median if row.whole_s else float("inf")


def summarize(options: Options, asked: Asked, visits: Sequence[Sequence[Visit]], run: str = "") -> Result:
    """`visits`: [process][visit]. Modes that no rank has come to say so."""
    met = {visit.mode for of_rank in visits for visit in of_rank}
    every = modes(options, asked)
    rows = [
        row(mode, [[v for v in of_rank if v.mode == mode] for of_rank in visits])
        if mode in met
        else Row(mode, cannot=cannot(mode, options, asked) or NOT_REACHED)
        for mode in every
    ]
    eager = [each for each in rows if each.mode.kind == "alone" and each.mode.how == "eager"]
    alone = min(map(median, eager), default=0)
    one = next((each.error for each in eager if each.error), None)
    rows = [replace(each, speedup=alone / median(each)) if each.whole_s and 0 < alone < 1e9 else each for each in rows]
    rows = [replace(each, over_one=each.error.over(one)) if each.error and one else each for each in rows]
    return Result(options, asked, tuple(rows), tuple(map(tuple, visits)), run or new_run())


def row(mode: Mode, visits: Sequence[Sequence[Visit]]) -> Row:
    """`visits`: [process][visit] of one mode. A repeat took as long as its slowest rank."""
    every = [visit for of_rank in visits for visit in of_rank]
    if cannot := next((visit.cannot for visit in every if visit.cannot), ""):
        return Row(mode, cannot=cannot)
    repeats = [[visit for visit in repeat if visit.seconds] for repeat in zip(*visits, strict=True)]
    timed = [[(visit.seconds, visit.images) for visit in repeat if visit.seconds] for repeat in repeats if repeat]
    whole = Spread.of([max(seconds.whole for seconds, _ in repeat) for repeat in timed])
    return Row(
        mode,
        repeats=len(timed),
        whole_s=whole,
        step_s=slowest([[seconds.step for seconds, _ in repeat] for repeat in timed]),
        decode_s=slowest([[seconds.decode for seconds, _ in repeat] for repeat in timed]),
        images_per_s=timed[0][0][1] / whole.median,
        memory_gb=max((visit.memory_gb for visit in every if visit.memory_gb is not None), default=None),
        warmth=tuple(tuple(gpu for visit in repeat for gpu in visit.warmth) for repeat in repeats if repeat),
        likeness=max((v.likeness for v in every if v.likeness), key=lambda each: each.max_abs, default=None),
        error=max((v.error for v in every if v.error), key=lambda each: each.picture, default=None),
        graphs=next((visit.graphs for visit in reversed(every) if visit.graphs), None),
        host=next((visit.host for visit in every if visit.host), None),
        profile=next((visit.profile for visit in every if visit.profile), None),
        picture=next((visit.picture for visit in every if visit.picture), None),
        note=next((visit.note for visit in every if visit.note), ""),
    )


def slowest(repeats: Sequence[Sequence[float | None]]) -> Spread | None:
    """Of each repeat the slowest rank; None where no rank has a figure."""
    found = [max(known) for repeat in repeats if (known := [each for each in repeat if each is not None])]
    return Spread.of(found) if found else None
