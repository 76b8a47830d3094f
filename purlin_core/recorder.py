"""What one rank's calls did while a trace was open: each call as the host saw it, and on the CPU every act of the protocol in it."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from purlin_core import _cpu
from purlin_core.prepare import Prepared

if TYPE_CHECKING:
    from purlin_core.connection import Connection

_RAN = 16  # outcomes below it: the call was made, whether it failed or not


class What(IntEnum):
    """The acts of csrc/purlin/trace.hpp, numbered as there."""

    STAGE = 0  # a copy into a peer's slot or output; in packets the notify too
    NOTIFY = 1  # the peer may look
    WAIT = 2  # for credit of the peer, or for its grant
    EXPECT = 3  # for the peer's message
    CONSUME = 4  # a copy out of a slot, or a sum of what all peers sent; in packets the wait for them too
    COME = 5  # within a sum of packets: this peer's was there
    LET_GO = 6  # the slot is the peer's again
    GRANT = 7  # leave for the peer to write my output
    OWN = 8  # a copy of what stays on this rank


class Use(IntEnum):
    """The channels of csrc/purlin/channel.hpp, numbered as there."""

    RING = 0
    GATHER = 1
    PACKET = 2
    DIRECT = 3


@dataclass(frozen=True, slots=True)
class Act:
    """One event; `staging`: of the role that stages. Times in ns of the machine's monotonic clock."""

    what: What
    staging: bool
    use: Use
    team: int
    step: int
    peer: int  # a rank; -1: all, or none
    call: int
    message: int
    wire_bytes: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Called:
    """One call; `begin` and `end` as the host saw them, in ns: on a GPU they hold its enqueuing only."""

    number: int
    prepared: Prepared
    begin: int
    end: int
    code: int
    captured: bool
    marks: tuple[torch.cuda.Event, torch.cuda.Event] | None  # before and behind its kernel on the stream


class Recorder:
    """Of one rank of one connection. `world`: the same for all ranks of this process that exchange with each other; `alone`: the other ranks are
    other processes'; `most`: acts kept, and calls."""

    def __init__(self, tie: Connection, world: Hashable, *, alone: bool, most: int) -> None:
        self.rank, self.ranks, self.world, self.alone = tie.rank, tie.ranks, world, alone
        self.device = tie.site.atom.device
        self.calls: deque[Called] = deque(maxlen=most)
        self._seen = 0
        self._tie = weakref.ref(tie)
        self._acts = None if tie.lane is not None else _cpu.Trace(most)
        self._base = None if tie.lane is None or tie.lane.capturing() else _mark(self.device)
        self._base_ns = 0
        if self._base is not None:
            self._base.synchronize()
            self._base_ns = time.monotonic_ns()
        tie.recorder, tie.bare = self, False
        if self._acts is not None:
            tie.end.record(self._acts)

    def run(
        self, end: _cpu.Endpoint, prepared: Prepared, at: list[int], to: list[int], stream: int, *, captured: bool
    ) -> int:
        """end.run(), written down."""
        number = end.calls
        timed = self._base is not None and not captured
        before = _mark(self.device) if timed else None
        begin = time.monotonic_ns()
        code = end.run(prepared.native, at, to, stream)
        called = time.monotonic_ns()
        marks = (before, _mark(self.device)) if before is not None else None
        if code < _RAN:
            self._seen += 1
            self.calls.append(Called(number, prepared, begin, called, code, captured, marks))
        return code

    def stop(self) -> None:
        """No further call is written down."""
        tie = self._tie()
        if tie is None:
            return
        tie.recorder = None
        tie.bare = tie.lane is None and tie.canaries is None
        if hasattr(tie, "end") and self._acts is not None:  # a closed one has none
            tie.end.record(None)

    def acts(self) -> list[Act]:
        """In the order in which they ended; none of a GPU, whose kernels look at no clock."""
        return [] if self._acts is None else [_act(numbers) for numbers in self._acts.events()]

    @property
    def lost(self) -> int:
        """Acts and calls that had to make room for later ones."""
        return (0 if self._acts is None else self._acts.lost) + self._seen - len(self.calls)

    def on_device(self, called: Called) -> tuple[int, int] | None:
        """When the GPU was at a call, in ns of the host's clock, to about a microsecond; None where that is not known. Waits for the GPU."""
        if called.marks is None or self._base is None:
            return None
        try:
            called.marks[1].synchronize()
            begin, end = (self._base_ns + round(self._base.elapsed_time(mark) * 1e6) for mark in called.marks)
        except RuntimeError:  # the CUDA context is broken, by whatever
            return None
        return begin, end


def _mark(device: torch.device) -> torch.cuda.Event:
    """An event on the device's current stream."""
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record(torch.cuda.current_stream(device))
    return mark


def _act(numbers: Sequence[int]) -> Act:
    what, role, use, *rest = numbers
    return Act(What(what), role == 1, Use(use), *rest)
