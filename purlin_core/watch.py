"""Notices when a peer's process dies, at once, however busy Python is elsewhere."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping


class Watch:
    """A thread that waits on the pidfds of the peers and tells `died(rank)`, once a peer."""

    def __init__(self, pids: Mapping[int, int], died: Callable[[int], None]) -> None:
        self._died = died
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # pidfd -> rank, of the living
        for rank, pid in pids.items():
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                died(rank)
                continue
            self._ranks[fd] = rank
            self._poll.register(fd, select.POLLIN)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="purlin-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which may be the caller, and close what it watched."""
        os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        ready: set[int] = set()
        while self._wake not in ready:
            ready = {fd for fd, _ in self._poll.poll()}
            for fd in ready - {self._wake}:
                self._bury(fd)
        for fd in (*self._ranks, self._wake):
            os.close(fd)

    def _bury(self, fd: int) -> None:
        self._poll.unregister(fd)
        os.close(fd)
        self._died(self._ranks.pop(fd))
