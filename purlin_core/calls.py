"""What a call is: a plan, looked up by all that it depends on, then run: on the CPU at once, on a GPU enqueued; and what is said when it fails.

What the plans of a call depend on stands in torch_names.py and exchange.py, the connection that it goes over is made in life.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from torch import Tensor
from torch.autograd import profiler

from purlin_core.arguments import check_memory
from purlin_core.canary import poison
from purlin_core.connection import Connection
from purlin_core.errors import INPUT_ERRORS, ClosedError, ConcurrentUseError, DeviceError, PurlinError, in_words
from purlin_core.plans import Plans, Stats
from purlin_core.prepare import Prepared, in_place
from purlin_core.ranges import named

_OVERLAP, _CONCURRENT = 16, 17  # Outcome in csrc/purlin/endpoint.hpp


class Calls:
    """Of one rank of one communicator. `granted_results`: see Communicator."""

    def __init__(self, tie: Connection, *, granted_results: bool) -> None:
        self.tie = tie
        self.device = tie.site.atom.device
        self.rank, self.ranks = tie.rank, tie.ranks
        self.granted_results = granted_results
        self.plans = Plans(Stats())
        self.last: Prepared | None = None
        self.budget = 0  # blocks of a call, inside budget()
        self.over = ""  # why there are no more
        self.id = 0  # the communicator's number, by which operators of torch call it

    def go_on(self, tie: Connection) -> None:
        """Over another connection. Plans of the old one end; what they counted stays."""
        self.plans = Plans(self.stats())
        self.tie, self.last = tie, None

    def stats(self) -> Stats:
        return self.plans.stats(self.tie.site.geometry)

    def check_usable(self, call: str) -> None:
        if self.over:
            raise ClosedError(f"{call}: the communicator {self.over}. Make a new one.")

    def refuse(self, error: Exception, look: Callable[[], None] | None = None) -> NoReturn:
        """Raise what a call came to before anything was sent: `error`, or, where that has no name of ours, what look() finds in the arguments.
        Ranks that wait for this one can tell of it."""
        try:
            if look is not None and not isinstance(error, INPUT_ERRORS):
                look()
            raise error
        except INPUT_ERRORS as named:
            self.tie.boards[self.rank].refuse(self.tie.entered, in_words(named))
            raise

    def planned(self, key: Any, call: str, make: Callable[[], Prepared]) -> Prepared:
        """What `make` gives, kept under `key`."""
        if self.tie.capturing:
            raise DeviceError(
                f"{call}: a CUDA graph is being captured, and this call is the first of its shapes. "
                "Make it once before the capture, or prepare it by plan()."
            )
        prepared = make()
        self.tie.boards[self.rank].note(prepared.signature, prepared.text)
        if self.plans.keep(key, prepared):
            self.tie.give_back(amid_calls=True)
        return prepared

    def run(
        self,
        prepared: Prepared,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        at: list[int],
        to: list[int],
        key: Any,
    ) -> None:
        """`at`, `to`: where inputs and outputs lie. `key`: the plan's."""
        if self.over:
            self.check_usable(prepared.text)
        if 0 in at or 0 in to:
            check_memory(prepared.text, (*inputs, *outputs), (*at, *to))
        if prepared.in_place:  # these shapes have shared storage before
            offsets = _offsets(at, to)
            prepared = prepared.in_place.get(offsets, prepared)
        tie = self.tie
        bare = tie.bare and not profiler._is_profiler_enabled
        code = tie.end.run(prepared.native, at, to, 0) if bare else self._attend(prepared, inputs, outputs, at, to)
        if code == 0:
            prepared.calls += 1
            self.last = prepared
        elif code == _OVERLAP:
            offsets = _offsets(at, to)
            prepared.in_place[offsets] = self._in_place(prepared, at, to, (key, offsets))
            self.run(prepared, inputs, outputs, at, to, key)
        else:
            raise self._failure(code, prepared)

    def _attend(
        self, prepared: Prepared, inputs: Sequence[Tensor], outputs: Sequence[Tensor], at: list[int], to: list[int]
    ) -> int:
        """Run where a stream or canaries are to be looked after, or somebody watches."""
        tie, lane = self.tie, self.tie.lane
        stream = 0 if lane is None else lane.enter()
        captured = lane is not None and lane.captured
        canaries = None if captured else tie.canaries
        if canaries is not None:
            canaries.feed()
            poison(outputs, inputs)
        if tie.recorder is None and not profiler._is_profiler_enabled:
            code = tie.end.run(prepared.native, at, to, stream)
        else:
            code = self._watched(prepared, at, to, stream, captured=captured)
        prepared.captured |= captured
        if canaries is not None and code == 0:
            canaries.look(prepared.text)
        return code

    def _watched(self, prepared: Prepared, at: list[int], to: list[int], stream: int, *, captured: bool) -> int:
        """Run under a trace or a profiler."""
        tie = self.tie
        with named("purlin ", prepared.text):
            if tie.recorder is None:
                return tie.end.run(prepared.native, at, to, stream)
            return tie.recorder.run(tie.end, prepared, at, to, stream, captured=captured)

    def _in_place(self, prepared: Prepared, at: Sequence[int], to: Sequence[int], apart: Any) -> Prepared:
        """Tensors that share storage: allowed in three forms, each checked once and then a plan of its own."""
        call = prepared.text.partition(" ")[0]
        return self.plans.get(apart) or self.planned(apart, call, partial(in_place, self.tie.site, prepared, at, to))

    def _failure(self, code: int, prepared: Prepared) -> PurlinError:
        if code == _CONCURRENT:
            return ConcurrentUseError(
                f"{prepared.text}: another thread is in a call of this communicator. Take turns, or make one a thread."
            )
        error = self.tie.error(prepared)
        if error is None:
            raise RuntimeError(f"{prepared.text}: the endpoint failed with code {code} and left no fault")
        return error


def _offsets(at: Sequence[int], to: Sequence[int]) -> tuple[int, ...]:
    """How tensors lie, wherever the first does."""
    first = at[0]
    return tuple([address - first for address in (*at, *to)])
