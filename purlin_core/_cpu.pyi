"""csrc/bindings.cpp, for type checkers; purlin_core._cuda shows the same names."""

from collections.abc import Sequence
from typing import Any

built_for: str  # the machines that this module has code for

class Geometry:
    def __init__(
        self, *, ranks: int, teams: int, slots: int, slot_bytes: int, window_bytes: int, heap_bytes: int
    ) -> None: ...
    ranks: int
    teams: int
    slots: int
    slot_bytes: int
    window_bytes: int
    heap_bytes: int
    rings_at: int
    packets_at: int
    heap_at: int
    arena_bytes: int

class Plan:
    def __init__(
        self,
        geometry: Geometry,
        *,
        kind: int,
        regime: int,
        op: int,
        dtype: int,
        rank: int,
        teams: int,
        parts: int,
        lag: int,
        grants: int,
        signature: int,
        own_from: Sequence[int],
        own_to: Sequence[int],
        send: Sequence[Sequence[int]],
        remote: Sequence[Sequence[int]],
        receive: Sequence[Sequence[int]],
        reach: Sequence[int],
        send_signatures: Sequence[int],
        receive_signatures: Sequence[int],
        input_spans: Sequence[int],
        output_spans: Sequence[int],
        overlap_allowed: bool,
        onto_sent: bool,
    ) -> None: ...
    @property
    def steps(self) -> int: ...

class Trace:
    def __init__(self, most: int) -> None: ...
    @property
    def lost(self) -> int: ...
    def events(self) -> list[list[int]]: ...

class Endpoint:
    def __init__(self, rank: int, geometry: Geometry, *, arenas: Sequence[int], timeout_s: float) -> None: ...
    def run(self, plan: Plan, inputs: Sequence[int], outputs: Sequence[int], stream: int) -> int: ...
    def abort(self, fault: int, about: int) -> None: ...
    def leave(self) -> None: ...
    def record(self, trace: Trace | None) -> None: ...
    def begin_at(self, message: int) -> None: ...
    @property
    def fault(self) -> tuple[int, int, int]: ...
    @property
    def stalled(self) -> tuple[int, int, int, int, int]: ...
    @property
    def calls(self) -> int: ...
    def post(self, rank: int) -> tuple[int, int]: ...

class Tensors:
    def __init__(self, type: type) -> None: ...
    def look(self, tensors: object) -> tuple[bytes, list[int]] | None: ...

def identities(holders: list[Any], known: bytes) -> bytes: ...

class Memory:
    def __init__(self, bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...

def give_back() -> None: ...
def can_reach(device: int, peer: int) -> bool: ...
def reach(peer: int) -> None: ...
def fuse(ranks: Sequence[Endpoint]) -> None: ...
