"""The life of a communicator: opened, given another heap, watched, aborted, closed; and over in a process that was forked from its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from purlin_core import ops
from purlin_core.calls import Calls
from purlin_core.errors import in_words
from purlin_core.opening import Opening
from purlin_core.plans import Plans
from purlin_core.recorder import Recorder
from purlin_core.rendezvous import LocalRendezvous


class Life:
    """Of one communicator; its calls ask `calls.over`. What each method is for stands at Communicator's of the same name."""

    def __init__(self, opening: Opening, heap_bytes: int, *, granted_results: bool) -> None:
        self._opening = opening
        self.calls = Calls(opening.connect(heap_bytes), granted_results=granted_results)
        self._opened = 1  # connections so far

    def reserve(self, heap_bytes: int) -> None:
        old = self.calls.tie
        old.gather(None)  # nobody is still in a call
        self.calls.go_on(self._opening.connect(heap_bytes))
        self._opened += 1
        old.part()
        old.give_back()

    def check(self) -> None:
        error = self.calls.tie.error(self.calls.last)
        if error is not None:
            raise error

    def abort(self, reason: str) -> None:
        if not self.calls.over:
            self.calls.tie.tell_why(reason)

    @contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not self.calls.over and self.calls.tie.healthy:
                self.abort(in_words(error))
            raise

    def close(self) -> None:
        calls = self.calls
        if not calls.over:
            calls.over = "is closed"
            calls.tie.part()
            calls.plans, calls.last = Plans(calls.plans.stats()), None
            calls.tie.give_back()

    @property
    def captured_together(self) -> bool:
        meeting = self._opening.meeting
        return isinstance(meeting, LocalRendezvous) and (meeting.fused or meeting.sharing > 1)

    def recorded(self, most: int) -> Recorder | None:
        calls, meeting = self.calls, self._opening.meeting
        if calls.over or calls.tie.recorder is not None:
            return None
        if isinstance(meeting, LocalRendezvous):
            return Recorder(calls.tie, (meeting.world, self._opened), alone=False, most=most)
        return Recorder(calls.tie, (meeting, self._opened), alone=calls.ranks > 1, most=most)


def _disown() -> None:
    """A forked child owns none of its parent's communicators: a call of the child would speak with the parent's voice."""
    for communicator in ops.living():
        communicator._calls.over = "belongs to the process that this one was forked from"


os.register_at_fork(after_in_child=_disown)
