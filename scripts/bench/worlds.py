"""Where ranks live: threads of one process, or processes of torchrun with a GPU each. To whoever measures they look alike."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from purlin_core import Communicator, LocalWorld
from purlin_core.tune import Regime, Row, Tuning, cuda_scratch

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Lane:
    """Ranks of this process whose calls go to one stream; None: of the CPU, which has none."""

    device: torch.device
    stream: torch.cuda.Stream | None
    ranks: tuple[int, ...]

    @contextmanager
    def current(self) -> Iterator[None]:
        """Calls of this thread go to the lane's stream."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield


@dataclass(frozen=True)
class Force:
    """A regime and a team count that every call takes which can; its text is "direct:8". `strict`: a team has one block of the GPU."""

    regime: Regime
    teams: int
    strict: bool = False

    @staticmethod
    def parse(text: str) -> Force:
        name, _, teams = text.partition(":")
        if name.upper() not in Regime.__members__ or not teams.isdigit() or int(teams) < 1:
            raise ValueError(f"needs REGIME:CTAS, as direct:8 or staged:16; got {text!r}")
        return Force(Regime[name.upper()], int(teams), strict=True)

    def __str__(self) -> str:
        return f"{self.regime.name.lower()}:{self.teams}"

    @property
    def granted(self) -> bool:
        """Whether it takes outputs of comm.empty(); the others do not care."""
        return self.regime is Regime.DIRECT

    def limit(self, comm: Communicator) -> AbstractContextManager[None]:
        """Around calls of `comm`."""
        return comm.budget(self.teams) if self.strict else nullcontext()

    def tuning(self, gpu: str, slots: int) -> Tuning:
        granted = True if self.granted else None
        lag = slots // 2 if self.regime is Regime.STAGED else 0
        return Tuning(gpu, (Row(None, None, granted, None, self.regime, self.teams, lag),), "what was asked for")


@dataclass
class World:
    """All ranks, and those of this process by their lanes. `communicators(force)` are made once and kept."""

    name: str  # "local" or "processes", as on record
    ranks: int
    lanes: Sequence[Lane]
    open: Callable[[Force | None], Mapping[int, Communicator]]
    meet: Callable[[], None]  # of processes: all come here
    slowest: Callable[[Sequence[float]], list[float]]  # of processes: number by number
    shut: Callable[[], None]
    window_bytes: int = 0  # of memory that rivals register
    kept: dict[Force | None, Mapping[int, Communicator]] = field(default_factory=dict)
    pool: Any = None  # what `window` lies in
    window: torch.Tensor | None = None

    @property
    def here(self) -> list[int]:
        return [rank for lane in self.lanes for rank in lane.ranks]

    @property
    def root(self) -> bool:
        """Whether this process prints and writes."""
        return 0 in self.here

    def lane_of(self, rank: int) -> Lane:
        return next(lane for lane in self.lanes if rank in lane.ranks)

    def communicators(self, force: Force | None = None) -> Mapping[int, Communicator]:
        if force not in self.kept:
            self.kept[force] = self.open(force)
        return self.kept[force]

    def each(self, fn: Callable[[int], object], lanes: Sequence[Lane] | None = None) -> None:
        """fn(rank) for each rank of these lanes (all of this process), each on a thread of its own, its lane current."""
        on_threads({rank: _in(lane, fn, rank) for lane in lanes or self.lanes for rank in lane.ranks})

    def synchronize(self) -> None:
        for lane in self.lanes:
            if lane.stream is not None:
                torch.cuda.synchronize(lane.device)


def _in(lane: Lane, fn: Callable[[int], object], rank: int) -> Callable[[], None]:
    def run() -> None:
        with lane.current():
            fn(rank)

    return run


def on_threads(work: Mapping[int, Callable[[], object]]) -> None:
    """All at once; a lone one on this thread. Raises the first error by rank."""
    if len(work) == 1:
        next(iter(work.values()))()
        return
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            work[rank]()
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]


# ---- threads of one process ------------------------------------------------------------------------------------------


def local_world(ranks: int, devices: Sequence[str], *, heap_bytes: int, fused: bool = True) -> World:
    """`ranks` threads: all on one device, fused in one launch or each on a stream of its own; or a device each. "cpu" too, for tests."""
    places = [torch.device(name) for name in (devices if len(devices) > 1 else [devices[0]] * ranks)]
    one = fused and len(devices) == 1
    lanes = _lanes(places, one)
    worlds: list[LocalWorld] = []

    def heap_of(force: Force | None) -> int:
        return heap_bytes if force is None or force.granted else 0

    def open_one(force: Force | None) -> Mapping[int, Communicator]:
        options = options_of(force, places[0], ranks)
        if not one and len(devices) == 1:
            options["fused"] = False
        device: Any = devices[0] if len(devices) == 1 else list(devices)
        world = LocalWorld(ranks, device=device, heap_bytes=heap_of(force), timeout=TIMEOUT_S, **options)
        worlds.append(world)
        return dict(enumerate(world.communicators))

    def shut() -> None:
        for world in worlds:
            world.close()

    return World("local", ranks, lanes, open_one, lambda: None, list, shut)


def _lanes(places: Sequence[torch.device], one: bool) -> list[Lane]:
    if places[0].type == "cpu":
        return [Lane(places[0], None, tuple(range(len(places))))]
    if one:
        return [Lane(places[0], stream_of(places[0]), tuple(range(len(places))))]
    return [Lane(place, stream_of(place), (rank,)) for rank, place in enumerate(places)]


def stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def options_of(force: Force | None, device: torch.device, ranks: int) -> dict[str, Any]:
    """Of a communicator; without a force it chooses itself."""
    if force is None:
        return {}
    return {"tuning": force.tuning(torch.cuda.get_device_name(device), cuda_scratch(ranks).slots)}


# ---- processes -------------------------------------------------------------------------------------------------------


def process_world(*, heap_bytes: int, window_bytes: int) -> World:
    """This process's rank among those of torchrun, a GPU each, over NCCL. Leave with shut()."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    opened: list[Communicator] = []

    def heap_of(force: Force | None) -> int:
        return heap_bytes if force is None or force.granted else 0

    def open_one(force: Force | None) -> Mapping[int, Communicator]:
        options = options_of(force, device, ranks)
        communicator = Communicator(device=device, heap_bytes=heap_of(force), timeout=TIMEOUT_S, **options)
        opened.append(communicator)
        return {rank: communicator}

    def meet() -> None:
        dist.barrier(device_ids=[device.index])
        torch.cuda.synchronize(device)

    def slowest(times: Sequence[float]) -> list[float]:
        mine = torch.tensor(times, dtype=torch.float64, device=device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return mine.tolist()

    def shut() -> None:
        for communicator in opened:
            communicator.close()
        dist.destroy_process_group()

    lanes = [Lane(device, stream_of(device), (rank,))]
    return World("processes", ranks, lanes, open_one, meet, slowest, shut, window_bytes=window_bytes)
