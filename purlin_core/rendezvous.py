"""How ranks find each other at set-up and part at the end: small values gathered from all, in bounded time."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from purlin_core.errors import SetupError


@runtime_checkable
class Rendezvous(Protocol):
    rank: int
    ranks: int

    def gather(self, value: Any, *, timeout: float) -> list[Any]:
        """`value` of every rank, in rank order; values are JSON. Raises SetupError, naming who did not come within `timeout` seconds."""
        ...


class StoreRendezvous:
    """Through a torch Store. Every rank counts its own communicators there, so a new one on the same group never meets an old one's keys."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._store = store
        self._number = store.add(f"purlin/count/{rank}", 1)
        self._step = 0

    def own_store(self, name: str) -> Store:
        """A store of this communicator alone."""
        return PrefixStore(f"purlin/{self._number}/{name}", self._store)

    def gather(self, value: Any, *, timeout: float) -> list[Any]:
        self._step += 1
        keys = [f"purlin/{self._number}/{self._step}/{r}" for r in range(self.ranks)]
        try:
            self._store.set(keys[self.rank], json.dumps(value))
            self._store.wait(keys, timedelta(seconds=timeout))
            return [json.loads(self._store.get(key)) for key in keys]
        except (RuntimeError, DistError) as error:
            raise SetupError(
                f"rank {self.rank}: {self._missing(keys)} did not come within {timeout:g} s ({error})."
            ) from error

    def _missing(self, keys: Sequence[str]) -> str:
        try:
            absent = [str(r) for r, key in enumerate(keys) if not self._store.check([key])]
        except (RuntimeError, DistError):
            return "the store"
        return f"rank {', '.join(absent)}"


class LocalRendezvous:
    """Between threads of one process. `sharing`: how many ranks are on one device; `fused`: their calls run as one, see LocalWorld."""

    class Meeting:
        def __init__(self, ranks: int, *, sharing: int = 1, fused: bool = False) -> None:
            self.ranks, self.sharing, self.fused = ranks, sharing, fused
            self.values: list[Any] = [None] * ranks
            self.gathers = [0] * ranks  # that each rank has come to
            self.barrier = threading.Barrier(ranks)

    def __init__(self, meeting: LocalRendezvous.Meeting, rank: int) -> None:
        self.rank, self.ranks = rank, meeting.ranks
        self.sharing, self.fused = meeting.sharing, meeting.fused
        self._meeting = meeting

    @property
    def world(self) -> Meeting:
        """The same object for all ranks."""
        return self._meeting

    def gather(self, value: Any, *, timeout: float) -> list[Any]:
        meeting = self._meeting
        meeting.values[self.rank] = value
        meeting.gathers[self.rank] += 1
        try:
            meeting.barrier.wait(timeout)
            values = list(meeting.values)
            meeting.barrier.wait(timeout)
        except threading.BrokenBarrierError as error:
            absent = [str(r) for r, count in enumerate(meeting.gathers) if count < meeting.gathers[self.rank]]
            raise SetupError(
                f"rank {self.rank}: rank {', '.join(absent)} of this process did not come within {timeout:g} s."
            ) from error
        return values


def meeting_of(group: Any, rank: int | None, ranks: int | None) -> Rendezvous:
    """What a Communicator is given: a Store with `rank` and `ranks`, or a group, a mesh, or a rendezvous. Raises SetupError."""
    if isinstance(group, Store):
        if not isinstance(rank, int) or not isinstance(ranks, int) or not 0 <= rank < ranks:
            raise SetupError(
                f"Communicator: a Store needs `rank` and `ranks` with 0 <= rank < ranks; got rank={rank!r}, ranks={ranks!r}."
            )
        return StoreRendezvous(group, rank, ranks)
    if rank is not None or ranks is not None:
        raise SetupError("Communicator: `rank` and `ranks` go with a Store only; a group knows them.")
    return group if isinstance(group, Rendezvous) else of_group(group)


def of_group(group: Any) -> StoreRendezvous:
    """A rendezvous over a torch process group (None: the default one), a device mesh of one dim."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise SetupError(
                f"Communicator: a device mesh of {group.ndim} dims names no single group. Pass one of its dims: mesh['name']."
            )
        group = group.get_group()
    if not dist.is_initialized():
        raise SetupError(
            "Communicator: torch.distributed is not initialised. Call init_process_group first, pass a Store, or use LocalWorld."
        )
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise SetupError("Communicator: this process is not a member of the group.")
    return StoreRendezvous(group.get_group_store(), rank, dist.get_world_size(group))
