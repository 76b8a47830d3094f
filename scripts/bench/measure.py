"""One case, all its rivals in turn: right before, timed in rounds in which they alternate, right after."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from bench import clock
from bench.cases import Case
from bench.record import Line, Run
from bench.rivals import Rival, UnavailableError
from bench.worlds import World
from purlin_core.errors import PurlinError

CHECKED = 4  # sets of buffers looked at before and after
EAGER_CALLS = 200  # threads take a tenth of a millisecond to start
MOST_SETS = 640  # of buffers in rotation


class WrongError(Exception):
    """A rival computed something else."""


@dataclass(frozen=True)
class Entry:
    """A rival before it is made: how it stands on record if it cannot be."""

    provider: str
    make: Callable[[Case, World, int], Rival]
    registered: bool = False
    forced: bool = False


@dataclass(frozen=True)
class Rotation:
    """`calls` a graph, `depth` sets of buffers; `hot`: they all fit into the L2 cache."""

    calls: int
    depth: int
    hot: bool


@dataclass(frozen=True)
class Times:
    """Of one rival, microseconds a call, a number a round; none and `why` where it cannot run."""

    entry: Entry
    rival: Rival | None
    us: Sequence[float]
    why: str = ""


@dataclass
class _Runner:
    """An entry that runs, or why it does not."""

    entry: Entry
    rival: Rival | None = None
    graphs: Sequence[torch.cuda.CUDAGraph] = ()
    why: str = ""
    us: list[float] = field(default_factory=list)


def rotations(case: Case, world: World, l2_bytes: int) -> list[Rotation]:
    """Beyond the L2 cache where some hundred calls can reach that, and within half of it where one call fits.

    All ranks of a device count together.
    """
    sharing: Counter[torch.device] = Counter()
    for lane in world.lanes:
        sharing[lane.device] += len(lane.ranks)
    per_call = case.touched_bytes * max(sharing.values())
    calls = 200 if case.bytes <= 1 << 17 else 40 if case.bytes <= 1 << 21 else 20 if case.bytes <= 1 << 24 else 6
    found = []
    cold = max(2, -(-3 * l2_bytes // (2 * per_call)))
    if cold <= MOST_SETS:
        found.append(Rotation(max(calls, cold) // cold * cold, cold, hot=False))
    hot = min(calls, l2_bytes // 2 // per_call)
    if hot:
        found.append(Rotation(min(calls, 16 * hot) // hot * hot, hot, hot=True))
    return found


def measure(
    case: Case, world: World, entries: Sequence[Entry], rotation: Rotation, *, rounds: int, mode: str = "graph"
) -> list[Times]:
    """Times of all entries, in their order; what fails or computes something else has none."""
    runners = [_ready(entry, case, world, rotation, mode) for entry in entries]
    running = [runner for runner in runners if runner.rival]
    for turn in range(rounds + 1):  # the first round warms up
        start = turn % max(len(running), 1)
        for runner in (*running[start:], *running[:start]):
            took = _once(world, runner, rotation, mode)
            if turn:
                runner.us.append(took)
    for runner in running:
        runner.graphs = ()
        if runner.rival:
            runner.why = _failure(partial(check, world, runner.rival))
    return [
        Times(runner.entry, runner.rival, [] if runner.why else world.slowest(runner.us), runner.why)
        for runner in runners
    ]


def _ready(entry: Entry, case: Case, world: World, rotation: Rotation, mode: str) -> _Runner:
    runner = _Runner(entry)

    def prepare() -> None:
        rival = entry.make(case, world, rotation.depth)
        check(world, rival)
        if mode == "graph":
            runner.graphs = clock.capture(world, rival, rotation.calls)
        runner.rival = rival

    runner.why = _failure(prepare)
    return runner


def _failure(act: Callable[[], None]) -> str:
    """What went wrong, in a line; empty when nothing did."""
    try:
        act()
    except (UnavailableError, WrongError) as error:
        return str(error)
    except (PurlinError, RuntimeError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""


def _once(world: World, runner: _Runner, rotation: Rotation, mode: str) -> float:
    assert runner.rival is not None
    runner.rival.refill()
    world.synchronize()
    world.meet()
    if mode == "graph":
        return clock.replay_us(world, runner.graphs, rotation.calls)
    return clock.eager_us(world, runner.rival, EAGER_CALLS)


def check(world: World, rival: Rival) -> None:
    """The first sets of buffers. Raises WrongError on every rank when one finds something wrong."""
    turns = range(min(len(rival.sets), CHECKED))
    for turn in range(len(rival.sets)):
        rival.fill(turn)
    world.synchronize()
    world.meet()
    clock.issue(world, rival, len(turns))
    world.synchronize()
    found = next(filter(None, map(rival.wrong, turns)), "") if rival.checked else ""
    if world.slowest([float(bool(found))])[0]:
        raise WrongError(f"wrong result: {found or 'on another rank'}")


def line(run: Run, world: World, case: Case, rotation: Rotation, times: Times, mode: str) -> Line:
    rival, us = times.rival, statistics.median(times.us) if times.us else None
    return Line(
        **asdict(run),
        provider=times.entry.provider,
        world=world.name,
        collective=case.collective,
        bytes=case.bytes,
        dtype=str(case.dtype).removeprefix("torch."),
        ranks=case.ranks,
        in_place=case.in_place,
        regime=(rival.regime if rival else None) or None,
        ctas=rival.ctas if rival else None,
        forced=times.entry.forced,
        registered=rival.registered if rival else times.entry.registered,
        hot=rotation.hot or bool(rival and len(rival.sets) < rotation.depth),
        mode=mode,
        us=None if us is None else round(us, 3),
        low_us=round(min(times.us), 3) if us else None,
        high_us=round(max(times.us), 3) if us else None,
        rounds=len(times.us),
        busbw_gbps=None if us is None else round(case.busbw_bytes / us / 1e3, 3),
        why=times.why,
    )
