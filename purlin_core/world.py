"""Ranks that are threads of this process: for tests, notebooks, and several devices driven by one program."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from purlin_core.atom import atom_of
from purlin_core.communicator import Communicator
from purlin_core.errors import INPUT_ERRORS, PeerError, SetupError
from purlin_core.rendezvous import LocalRendezvous
from purlin_core.settings import ask_for_queues

T = TypeVar("T")

ALIKE_SECONDS = 1.0  # how long a rank with bad input waits to see whether all ranks have it


class LocalWorld:
    """`ranks` communicators of one process. `run(fn)` calls fn(communicator) on a thread a rank and returns the results in rank order.

    `device`: one for all ranks, or a list of one a rank. On one GPU the calls of all ranks are one kernel (`fused`), which is right whatever else
    runs there; each rank's call returns when the last rank has called. `fused=False` gives each rank a stream and kernels of its own, for ranks
    that capture graphs: what they run needs to have run before (a kernel that is loaded while another waits for it stalls both).
    Other keyword arguments are Communicator's. Each rank computes with cores // ranks threads (torch.set_num_threads, per thread).
    Raises SetupError and DeviceError.
    """

    def __init__(
        self,
        ranks: int,
        device: torch.device | str | Sequence[torch.device | str] = "cpu",
        *,
        fused: bool = True,
        **arguments: Any,
    ) -> None:
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise SetupError(f"LocalWorld: needs a count of 1 rank or more; got {ranks!r}.")
        self.ranks = ranks
        if not fused and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            ask_for_queues()
        devices = _devices(ranks, device)
        sharing = ranks if devices[0].type == "cuda" and len(set(devices)) == 1 else 1
        meeting = LocalRendezvous.Meeting(
            ranks, sharing=sharing, fused=fused and devices[0].type == "cuda" and ranks > 1
        )
        self.communicators: list[Communicator] = []
        self._seats = [Seat(each) for each in devices]
        if sharing > 1 and not fused:
            self._seats = [Seat(each, torch.cuda.Stream(each)) for each in devices]  # type: ignore[no-untyped-call]
        self.communicators = self._on_threads(
            lambda rank: Communicator(LocalRendezvous(meeting, rank), devices[rank], **arguments)
        )

    def run(self, fn: Callable[[Communicator], T]) -> list[T]:
        """Raises the first exception of a rank that is not the echo of another's. guard() releases the other ranks, and the world is dead.

        Bad input touches no channel: when every rank ends in such an error, the next run works. On a GPU a rank's thread works on the stream that is
        current where run() is called, or on the rank's own, which begins behind that one and ends before it: to the caller run() is in stream order.
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

        return self._on_threads(guarded)

    def close(self) -> None:
        """Close all communicators. Idempotent."""
        communicators = self.communicators
        if communicators:
            self._on_threads(lambda rank: communicators[rank].close())

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_threads(self, fn: Callable[[int], T]) -> list[T]:
        """fn(rank) on a thread a rank, each in its seat."""
        with ExitStack() as stack:
            taken = [stack.enter_context(seat.taken()) for seat in self._seats]

            def seated(rank: int) -> T:
                with taken[rank].current():
                    return fn(rank)

            return _on_threads(self.ranks, seated)


@dataclass(frozen=True)
class Seat:
    """Where a rank's thread works: a device and, on a GPU, a stream; None: the one that is current for the caller."""

    device: torch.device
    stream: torch.cuda.Stream | None = None

    @contextmanager
    def taken(self) -> Iterator[Seat]:
        """On the caller's thread, around the work: a stream of the rank's own begins behind the caller's and ends before it."""
        if self.device.type != "cuda":
            yield self
            return
        callers = torch.cuda.current_stream(self.device)
        if self.stream is None:
            yield Seat(self.device, callers)
            return
        self.stream.wait_stream(callers)
        try:
            yield self
        finally:
            callers.wait_stream(self.stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        """On the rank's thread."""
        if self.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield


def _devices(ranks: int, device: torch.device | str | Sequence[torch.device | str]) -> list[torch.device]:
    """One a rank. On GPUs all ranks share one, or no two do. Raises SetupError and DeviceError."""
    if isinstance(device, torch.device | str):
        return [atom_of(device).device] * ranks
    if not isinstance(device, Sequence):
        raise SetupError(f"LocalWorld: `device` needs to be a device, or a list of one a rank; got {device!r:.80}.")
    devices = [atom_of(each).device for each in device]
    if len(devices) != ranks:
        raise SetupError(f"LocalWorld: needs a device for each of {ranks} ranks; got {len(devices)}.")
    different = len(set(devices))
    if devices[0].type == "cuda" and different not in (1, ranks):
        raise SetupError(
            f"LocalWorld: needs one GPU for all ranks, or one a rank; got {different} for {ranks} ranks: {', '.join(map(str, devices))}."
        )
    return devices


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
