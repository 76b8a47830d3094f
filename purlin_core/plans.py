"""The calls a communicator has prepared, by all that they depend on; kept up to a bound, and counted beyond it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from purlin_core._cpu import Geometry
from purlin_core.prepare import Prepared

MOST_PLANS = 4096  # kept; a plan takes a few KiB


@dataclass(frozen=True)
class Stats:
    """What this rank did since its communicator was made. Bytes are payload: neither padding nor tags. Replays of a CUDA graph are not seen."""

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    regimes: Mapping[str, int] = field(default_factory=dict)  # calls in each
    scratch_bytes: int = 0  # of this rank's inbox, heap not counted
    heap_bytes: int = 0


class Plans:
    """`before`: what has been counted already."""

    def __init__(self, before: Stats) -> None:
        self._before = before
        self._plans: dict[Any, Prepared] = {}
        self._captured: list[Prepared] = []  # forgotten, but a CUDA graph may read what they keep on the device
        self.get = self._plans.get  # the dict's own: every call makes it

    def __len__(self) -> int:
        return len(self._plans)

    def keep(self, key: Any, prepared: Prepared) -> bool:
        """Keep it. True when all others were forgotten for it."""
        full = len(self._plans) >= MOST_PLANS  # a stream of ever new shapes: begin anew
        if full:
            self._before = self.stats()
            self._captured += [plan for plan in self._plans.values() if plan.captured]
            self._plans.clear()
        self._plans[key] = prepared
        return full

    def stats(self, geometry: Geometry | None = None) -> Stats:
        """All that was counted, and the sizes of `geometry`."""
        before = self._before
        called = [plan for plan in self._plans.values() if plan.calls]
        regimes = dict(before.regimes)
        for plan in called:
            name = plan.schedule.regime.name.lower()
            regimes[name] = regimes.get(name, 0) + plan.calls
        return Stats(
            calls=before.calls + sum(plan.calls for plan in called),
            sent_bytes=before.sent_bytes + sum(plan.calls * plan.sent_bytes for plan in called),
            received_bytes=before.received_bytes + sum(plan.calls * plan.received_bytes for plan in called),
            regimes=regimes,
            scratch_bytes=geometry.arena_bytes - geometry.heap_bytes if geometry else 0,
            heap_bytes=geometry.heap_bytes if geometry else 0,
        )
