"""Ranks that are threads of this process: for tests, notebooks, and several devices driven by one program."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from purlin_core.communicator import Communicator
from purlin_core.errors import INPUT_ERRORS, PeerError, SetupError
from purlin_core.rendezvous import LocalRendezvous

T = TypeVar("T")

ALIKE_SECONDS = 0.25  # how long a rank with bad input waits to see whether all ranks have it


class LocalWorld:
    """`ranks` communicators of one process. `run(fn)` calls fn(communicator) on a thread a rank and returns the results in rank order.

    Keyword arguments are Communicator's. Each rank computes with cores // ranks threads (torch.set_num_threads, per thread). Raises SetupError.
    """

    def __init__(self, ranks: int, **arguments: Any) -> None:
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise SetupError(f"LocalWorld: needs a count of 1 rank or more; got {ranks!r}.")
        self.ranks = ranks
        meeting = LocalRendezvous.Meeting(ranks)
        self.communicators: list[Communicator] = []
        self.communicators = _on_threads(ranks, lambda rank: Communicator(LocalRendezvous(meeting, rank), **arguments))

    def run(self, fn: Callable[[Communicator], T]) -> list[T]:
        """Raises the first exception of a rank that is not the echo of another's. guard() releases the other ranks, and the world is dead.

        Bad input touches no channel: when every rank ends in such an error, the next run works.
        """
        everyone = threading.Barrier(self.ranks)

        def guarded(rank: int) -> T:
            communicator = self.communicators[rank]
            with communicator.guard():
                try:
                    return fn(communicator)
                except INPUT_ERRORS as error:
                    if not _all_come(everyone):
                        raise
                    alike = error
            raise alike

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


def _all_come(barrier: threading.Barrier) -> bool:
    try:
        barrier.wait(ALIKE_SECONDS)
    except threading.BrokenBarrierError:
        return False
    return True


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
