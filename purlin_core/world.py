"""Ranks that are threads of this process: for tests, notebooks, and several devices driven by one program."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from purlin_core.communicator import Communicator
from purlin_core.errors import PeerError, SetupError
from purlin_core.rendezvous import LocalRendezvous

T = TypeVar("T")


class LocalWorld:
    """`ranks` communicators of one process. `run(fn)` calls fn(communicator) on a thread a rank and returns the results in rank order.

    Keyword arguments are Communicator's. Each rank computes with cores // ranks threads (torch.set_num_threads, per thread). Raises SetupError.
    """

    def __init__(self, ranks: int, **arguments: Any) -> None:
        if ranks < 1:
            raise SetupError(f"LocalWorld: needs at least 1 rank; got {ranks}.")
        self.ranks = ranks
        meeting = LocalRendezvous.Meeting(ranks)
        self.communicators: list[Communicator] = []
        self.communicators = _on_threads(ranks, lambda rank: Communicator(LocalRendezvous(meeting, rank), **arguments))

    def run(self, fn: Callable[[Communicator], T]) -> list[T]:
        """Raises the first exception of a rank that is not the echo of another's; the other ranks are released by guard()."""

        def guarded(rank: int) -> T:
            communicator = self.communicators[rank]
            with communicator.guard():
                return fn(communicator)

        return _on_threads(self.ranks, guarded)

    def close(self) -> None:
        """Close all communicators. Idempotent."""
        communicators = self.communicators
        if communicators:
            _on_threads(self.ranks, lambda rank: communicators[rank].close())

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _on_threads(ranks: int, fn: Callable[[int], T]) -> list[T]:
    results: list[Any] = [None] * ranks
    errors: dict[int, BaseException] = {}
    share = max(1, (os.cpu_count() or 1) // ranks)

    def work(rank: int) -> None:
        torch.set_num_threads(share)
        try:
            results[rank] = fn(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"purlin-rank-{rank}", daemon=True) for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors.values() if not isinstance(e, PeerError)), next(iter(errors.values())))
    return results
