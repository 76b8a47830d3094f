"""How far a host may run ahead of its GPUs: one root call, and only within a pipeline's loop of steps.

A host that waited for the end of each call would launch the next while the GPU idles. So in a loop of steps it waits, when a call has been launched,
for the end of the one before, and hears then what that has met; at the end of the loop it waits for all. A failure is raised by the next call, or
where the loop ends: in any case before the picture leaves. Elsewhere each call is heard before it returns. With one rank, or on the CPU, nothing
waits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import MethodType
from typing import Any, Protocol

import torch

from purlin_diffusion.carrier import Carrier

BAR = "progress_bar"  # of a pipeline: what it returns stands around the loop of steps, in a `with`
BEGIN = "check_inputs"  # what a pipeline calls before anything else


class Mark(Protocol):
    """A point on the root's stream."""

    def synchronize(self) -> None:
        """Wait until the GPU has come to it."""


class Line(Protocol):
    """What root calls are launched on. GpuLine, or a test's."""

    def capturing(self) -> bool:
        """Whether it is recorded now, so that nothing may be waited for."""

    def place(self) -> Hashable:
        """Where calls are launched now: calls of one place are in order by themselves."""

    def mark(self) -> Mark:
        """The end of all that was launched."""


class GpuLine:
    """The streams that are current on `devices`, of which the first is the root's."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(dict.fromkeys(devices))

    def capturing(self) -> bool:
        with torch.cuda.device(self._devices[0]):
            return torch.cuda.is_current_stream_capturing()

    def place(self) -> Hashable:
        return tuple(torch.cuda.current_stream(device) for device in self._devices)

    def mark(self) -> Mark:
        ended: Mark = torch.cuda.current_stream(self._devices[0]).record_event()
        return ended


def line_of(devices: Sequence[torch.device], ranks: int) -> Line | None:
    """None where the host hears all at once: one rank has nothing to hear, and calls on the CPU have ended when they return."""
    return GpuLine(devices) if ranks > 1 and devices[0].type == "cuda" else None


class Ahead:
    """The latest root call of one session, as long as the host has not heard its end."""

    def __init__(self, devices: Sequence[torch.device], ranks: int, *, counts: bool = False) -> None:
        """`counts`: other ranks run loops of their own, and compare where they are."""
        self._line = line_of(devices, ranks)
        self.counts = counts and ranks > 1
        self._latest: Mark | None = None
        self.heard = 0  # failures, by whichever thread
        self.failure: BaseException | None = None  # the latest of them
        self.pictures = 0  # begun, whether their steps were or not
        self._place: Hashable = None  # of the latest
        self._here = threading.local()  # `loops`: those that the thread is in; `calls`: made in the innermost

    @property
    def waits(self) -> bool:
        """Whether there is a GPU to wait for."""
        return self._line is not None

    @contextmanager
    def loop(self) -> Iterator[None]:
        """For calls of this thread that may be heard late. Whoever opens it settles at its end."""
        before = getattr(self._here, "loops", 0), getattr(self._here, "calls", None)
        self._here.loops, self._here.calls = before[0] + 1, 0
        try:
            yield
        finally:
            self._here.loops, self._here.calls = before

    def place_in_loop(self) -> str:
        """Which call of the loop that the thread is in comes now; each is asked for once."""
        calls = getattr(self._here, "calls", None)
        if calls is None:
            return "a call outside of a pipeline's steps"
        self._here.calls = calls + 1
        return f"call {calls + 1} of the pipeline's steps"

    def moved(self) -> bool:
        """Whether a call launched now could overtake the latest: exchanges of two calls never run at once."""
        if self._latest is None or (line := self._free_line()) is None:
            return False
        return line.place() != self._place

    def launched(self, carrier: Carrier) -> None:
        """A call has been launched: wait for the one before in a loop, else for this one. Raises what it met."""
        if (line := self._free_line()) is None:
            return
        before, self._latest, self._place = self._latest, line.mark(), line.place()
        if not getattr(self._here, "loops", 0):
            self.settled(carrier)
        elif before is not None:
            self._hear(before, carrier)

    def settled(self, carrier: Carrier) -> None:
        """Wait for all that was launched. Raises what it met; once."""
        if (latest := self._taken()) is not None:
            self._hear(latest, carrier)

    def forget(self) -> None:
        """Wait for all that was launched, and hear nothing: something else is raised, or there is nobody to tell."""
        if (latest := self._taken()) is not None:
            with suppress(RuntimeError):  # the CUDA context is broken, by whatever: nothing runs in it any more
                latest.synchronize()

    def _hear(self, mark: Mark, carrier: Carrier) -> None:
        mark.synchronize()
        try:
            carrier.check()
        except BaseException as error:
            self.heard, self.failure = self.heard + 1, error
            raise

    def _taken(self) -> Mark | None:
        if self._free_line() is None:
            return None
        latest, self._latest = self._latest, None
        return latest

    def _free_line(self) -> Line | None:
        return self._line if self._line is not None and not self._line.capturing() else None


class Settling(Protocol):
    """A session, as far as it is of concern here."""

    @property
    def ahead(self) -> Ahead: ...

    def check(self) -> None: ...

    def steps_ended(self, error: BaseException | None) -> None: ...


class Loop:
    """In the place of a pipeline's `progress_bar` from open() until close(): in the `with` of a bar `sessions` may run ahead; at its end they settle.

    Whoever replaces it, or draws without it, has each call heard before it returns. Pictures are counted where a pipeline checks its inputs.
    """

    def __init__(self, pipe: Any, sessions: Sequence[Settling]) -> None:
        self._pipe, self._below = pipe, getattr(pipe, BAR)
        self._put: dict[str, Any] = {BAR: self}
        if callable(check := getattr(pipe, BEGIN, None)):
            self._put[BEGIN] = _Begin(pipe, check, self._begin)
        self._before = {name: own for name, own in vars(pipe).items() if name in self._put}  # a user's own
        self._sessions = [
            weakref.ref(session) for session in sessions
        ]  # a model keeps its ranks alive, and nobody else

    def open(self) -> None:
        vars(self._pipe).update(self._put)

    def close(self) -> None:
        """Give the pipeline back as it was."""
        for name, ours in self._put.items():
            if vars(self._pipe).get(name) is ours:
                del vars(self._pipe)[name]
                if name in self._before:
                    vars(self._pipe)[name] = self._before[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What was there before returns, but for what its `with` does."""
        return _Bar(self._below(*args, **kwargs), self._around)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the pipeline has the bar of its class."""
        return _of_copy(self, self._pipe, BAR, memo)

    def _begin(self) -> None:
        for each in self._sessions:
            if (session := each()) is not None:
                session.ahead.pictures += 1

    @contextmanager
    def _around(self) -> Iterator[None]:
        """An exception inside is told as it is, and to the other ranks; what was launched before it the next call hears. A failure that another
        thread has heard meanwhile is raised here, too: a call of this loop may have met it."""
        sessions = [session for each in self._sessions if (session := each()) is not None]
        before = [session.ahead.heard for session in sessions]
        try:
            with ExitStack() as loops:
                for session in sessions:
                    loops.enter_context(session.ahead.loop())
                yield
        except BaseException as error:
            for session in sessions:
                session.steps_ended(error)
            raise
        for session, heard in zip(sessions, before, strict=True):
            session.check()
            if session.ahead.heard != heard and session.ahead.failure is not None:
                raise session.ahead.failure
            session.steps_ended(None)


class _Begin:
    """What a pipeline does first, with `begin` before it."""

    def __init__(self, pipe: Any, below: Callable[..., Any], begin: Callable[[], None]) -> None:
        self._pipe, self._below, self._begin = pipe, below, begin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        return self._below(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _of_copy(self, self._pipe, BEGIN, memo)


def _of_copy(ours: object, pipe: object, name: str, memo: dict[int, Any]) -> Any:
    """What a copy of `pipe` has in the place of `ours`: the method of its class."""
    copied = memo.get(id(pipe))
    return ours if copied is None else MethodType(getattr(type(copied), name), copied)


class _Bar:
    """A progress bar, with `around` around its `with`."""

    def __init__(self, bar: Any, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._bar, self._around, self._entered = bar, around, ExitStack()

    def __enter__(self) -> Any:
        with ExitStack() as entered:
            entered.enter_context(self._around())
            bar = entered.enter_context(self._bar)
            self._entered = entered.pop_all()
        return bar

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._bar)

    def __len__(self) -> int:
        return len(self._bar)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)


def loop_of(pipe: Any, sessions: Sequence[Settling]) -> Loop | None:
    """The loop of a pipeline, in its place; None where there is no bar to stand around it, or nothing to wait for and nobody to count with."""
    running = [session for session in sessions if session.ahead.waits or session.ahead.counts]
    if not running or not callable(getattr(pipe, BAR, None)):
        return None
    loop = Loop(pipe, running)
    loop.open()
    return loop
