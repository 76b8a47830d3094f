"""What was done by graphs, as a handle tells it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphCounts:
    """Recordings made, calls that were replays (the recorded call is the first), recordings given up again, milliseconds spent in recording, bytes
    that recordings hold on this rank's device. `off`: why there are none, now or at all; empty while there is nothing against them."""

    captures: int = 0
    replays: int = 0
    evictions: int = 0
    capture_ms: float = 0.0
    pool_bytes: int = 0
    off: str = ""
