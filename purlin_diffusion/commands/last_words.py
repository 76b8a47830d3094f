"""What a run says when it is told to end by SIGINT or SIGTERM, whatever its main thread is doing.

Python runs a signal's handler between two instructions of the main thread. A rank that waits in C for a GPU, or for a peer that has gone, comes to no
other instruction, and one that cleans up waits for that peer again. So a thread says what there is to say: it reads where C writes each signal as it
comes. The main thread meets KeyboardInterrupt and has some seconds to end by itself. A launcher's process has none, because a group whose peers are
gone may not be torn down.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from purlin_diffusion.commands.exits import FAILED, INTERRUPTED, told

SIGNALS = {signal.SIGINT, signal.SIGTERM}
END_SECONDS = 10.0  # from a signal to the end of the process, at most; torchrun kills after 30
LEFT = 0  # no signal's number


class LastWords:
    """`with LastWords(command, say, ...) as words:` calls say() when a signal comes, or when an exception leaves; not after words.say(all).

    say: once, in either thread; an exception of it is a line, and the end is as it would have been. launched: the process ends as soon as that is
    said. cleaned: called where the process is ended here. A second signal, after those words, ends it at once. A signal that is ignored stays so.
    Outside of the main thread Python hears none, and exceptions alone count.
    """

    def __init__(self, command: str, say: Callable[[], None], *, launched: bool, cleaned: Callable[[], None]) -> None:
        self._command, self._say, self._launched, self._cleaned = command, say, launched, cleaned
        self._saying, self._said = threading.Lock(), False
        self._leaving = False  # the main thread is on its way out: it is not to be interrupted
        self._left = False
        self._watching: threading.Thread | None = None

    def __enter__(self) -> LastWords:
        if threading.current_thread() is threading.main_thread():
            self._listen()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self._leaving = True
        try:
            if error is not None:
                self._last()
        finally:
            if self._watching is not None:
                self._leave(self._watching)

    def say(self, every: Callable[[], None]) -> None:
        """In the main thread: every() instead."""
        self._leaving = True
        self._once(every)

    def _once(self, say: Callable[[], None]) -> None:
        with self._saying:
            if not self._said:
                self._said = True
                say()

    def _last(self) -> None:
        try:
            self._once(self._say)
        except Exception as error:  # what ends the run is told, not this
            told(self._command, f"what was measured could not be told: {type(error).__name__}: {error}", FAILED)

    # ---- signals
    def _listen(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._watching = threading.Thread(target=self._watch, name="purlin-last-words", daemon=True)
        self._watching.start()
        self._written = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._handlers: dict[int, Any] = {
            number: signal.signal(number, self._interrupt)
            for number in SIGNALS
            if signal.getsignal(number) not in (signal.SIG_IGN, None)  # None: not Python's
        }

    def _leave(self, watching: threading.Thread) -> None:
        """All as it was; no return where a launcher's process is told to end."""
        os.write(self._writing, bytes([LEFT]))
        watching.join()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._written)
        os.close(self._reading)
        os.close(self._writing)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """In the main thread, if it ever comes to it."""
        if not self._launched and not self._leaving:
            self._leaving = True
            raise KeyboardInterrupt

    # ---- in the thread
    def _watch(self) -> None:
        if not self._heard():
            return
        late = threading.Timer(END_SECONDS, self._end)
        late.daemon = True
        late.start()
        self._last()
        while self._heard(0):  # the same wish: timeout(1) sends each signal twice, launchers one kind after the other
            pass
        if self._launched or self._heard():
            told(self._command, "interrupted", INTERRUPTED)
            self._end()
        late.cancel()

    def _heard(self, seconds: float | None = None) -> bool:
        """Wait for a signal. False when none has come, or the main thread has left."""
        while not self._left and select.select([self._reading], [], [], seconds)[0]:
            came = set(os.read(self._reading, 64))
            self._left = LEFT in came
            if came & SIGNALS:
                return True
        return False

    def _end(self) -> None:
        try:
            self._cleaned()
        finally:
            os._exit(INTERRUPTED)
