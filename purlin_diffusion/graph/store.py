"""The recordings of one model: which call is one, which is due, and when they go. What it does follows from the sequence of calls."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

import torch

from purlin_diffusion.graph.counts import GraphCounts
from purlin_diffusion.graph.key import Key
from purlin_diffusion.graph.recorder import Pool

KNOWN = 256  # calls remembered as seen
# Recordings in a row that went, for want of room, without a replay after their own call: then there are no more.
WASTED = 8
FAILED = 3  # calls that could not be recorded: then there are no more

_log = logging.getLogger("purlin_diffusion")


class Freeable(Protocol):
    def free(self) -> None: ...


T = TypeVar("T", bound=Freeable)


class Wish(IntEnum):
    """What a rank would do with a call. Where ranks wish different things, all do the least of them."""

    EAGER = 0
    CAPTURE = 1
    REPLAY = 2


@dataclass(frozen=True)
class Limits:
    """`keys`: recordings kept. `memory`: the share of what a device had free before its first recording that all of them may hold there."""

    keys: int
    memory: float


def one_line(error: Exception) -> str:
    """An error as a reason."""
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


class Store(Generic[T]):
    """`pools`: one a device that this process records on. `off`: why there are no recordings at all."""

    def __init__(self, pools: Sequence[Pool], limits: Limits, off: str = "") -> None:
        self.pools, self.off = tuple(pools), off
        self._limits, self._most_bytes = limits, [0] * len(pools)
        self._state: Hashable = None
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._refused: dict[Hashable, str] = {}
        self._takes: OrderedDict[Hashable, T] = OrderedDict()  # the one used last is the last
        self._uses: dict[Hashable, int] = {}
        self._why = ""  # the latest call was none
        self._captures = self._replays = self._evictions = self._wasted = self._failures = 0
        self._capture_ms = 0.0

    def look(self, key: Key) -> Wish:
        """What is due. When the model's state has changed all recordings are stale, and freed."""
        if self.off:
            return Wish.EAGER
        if key.state != self._state:
            self.forget()
            self._state = key.state
        self._why = key.unfit or self._refused.get(key.call, "")
        if self._why:
            return Wish.EAGER
        if key.call in self._takes:
            return Wish.REPLAY
        return Wish.CAPTURE if key.call in self._seen else Wish.EAGER

    def ran(self, key: Key) -> None:
        """The call has run eagerly, and may be recorded the next time."""
        self._seen[key.call] = None
        self._seen.move_to_end(key.call)
        while len(self._seen) > KNOWN:
            self._seen.popitem(last=False)

    def measure(self) -> None:
        """Before a recording: how much the first may hold."""
        for i, pool in enumerate(self.pools):
            self._most_bytes[i] = self._most_bytes[i] or int(self._limits.memory * pool.free_bytes)

    def add(self, key: Key, take: T, ms: float) -> bool:
        """Keep what was recorded in `ms` milliseconds; the one used longest ago goes. False when it takes too much memory: then it is freed.

        Recordings share memory, which comes back when the last of them goes. So where all are too many, all go, and this one may come back alone.
        """
        self._captures, self._capture_ms = self._captures + 1, self._capture_ms + ms
        self._takes[key.call], self._uses[key.call] = take, 0
        while len(self._takes) > self._limits.keys:
            self._drop_oldest()
        if key.call not in self._takes:
            return False
        used = [(pool.used_bytes, most) for pool, most in zip(self.pools, self._most_bytes, strict=True)]
        if all(size <= most for size, most in used):
            return True
        if len(self._takes) == 1:
            size, most = max(used)
            self.refuse(
                key,
                f"it takes {size / 2**20:.0f} MiB, and graph_memory={self._limits.memory} is {most / 2**20:.0f} MiB here",
            )
        self.drop_all()
        return False

    def use(self, key: Key) -> T:
        """The recording of a call, about to be replayed."""
        take = self._takes[key.call]
        self._takes.move_to_end(key.call)
        self._uses[key.call] += 1
        self._replays += 1
        if self._uses[key.call] > 1:
            self._wasted = 0
        return take

    def drop(self, key: Key) -> None:
        """Give one recording up, which another rank could not make."""
        if (take := self._takes.pop(key.call, None)) is not None:
            take.free()
            self._evictions += 1
            self._release()

    def refuse(self, key: Key, why: str) -> None:
        """No more recordings of this call while the model's state is what it is."""
        self.drop(key)
        self._refused[key.call] = self._why = why
        _log.warning("purlin_diffusion: a call stays without a CUDA graph: %s", why)

    def broke(self, error: Exception) -> str:
        """A recording broke off: why. One that ran out of memory may have it the next time."""
        if isinstance(error, torch.OutOfMemoryError):
            self.drop_all()
        return one_line(error)

    def failed(self, key: Key, why: str) -> None:
        """The call could not be recorded, but runs eagerly."""
        self._failures += 1
        self.refuse(key, why)
        self._release()  # also what a recording that broke off has left
        if self._failures >= FAILED:
            self.stop(f"{FAILED} calls could not be recorded; the last: {why}")

    def stop(self, why: str) -> None:
        """No more recordings."""
        self.forget()
        self.off = why
        _log.warning("purlin_diffusion: no more CUDA graphs: %s", why)

    def forget(self) -> None:
        """Begin anew: what is known of calls was of another model."""
        self._seen.clear()
        self._refused.clear()
        self.drop_all()

    def drop_all(self) -> None:
        """Free all recordings; calls stay known."""
        if not self._takes:
            return
        for take in self._takes.values():
            take.free()
        self._evictions += len(self._takes)
        self._takes.clear()
        self._release()

    def counts(self, pool: Pool | None = None) -> GraphCounts:
        """`pool_bytes` of one rank's `pool`; 0 for a rank without."""
        used = pool.used_bytes if pool is not None and self._takes else 0
        why = self.off or self._why
        return GraphCounts(self._captures, self._replays, self._evictions, self._capture_ms, used, why)

    def _drop_oldest(self) -> None:
        call, take = self._takes.popitem(last=False)
        take.free()
        self._evictions += 1
        self._wasted += self._uses[call] <= 1
        if self._wasted >= WASTED:
            self.stop(
                f"{WASTED} in a row were never used again, because calls differ too much: raise graph_keys, or pass graph=False"
            )

    def _release(self) -> None:
        if not self._takes:
            self._uses.clear()
            for pool in self.pools:
                pool.release()
