"""Threads that hold the ranks of one process, other than its root. They end when their Worker is closed or collected."""

from __future__ import annotations

import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

_Job: TypeAlias = "tuple[Callable[[], Any], Future[Any]] | None"
JOIN_SECONDS = 5.0


class Worker:
    """One daemon thread that runs what it is given, in order."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        self.close = weakref.finalize(self, _stop, self._jobs, self._thread, os.getpid())

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, job: Callable[[], Any]) -> Future[Any]:
        """Start `job` when those before it are done. Its exception comes out of the future."""
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        return future


def _serve(jobs: queue.SimpleQueue[_Job]) -> None:
    while (given := jobs.get()) is not None:
        job, future = given
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        del given, job, future  # a job holds a forward's tensors


def _stop(jobs: queue.SimpleQueue[_Job], thread: threading.Thread, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no such thread
        jobs.put(None)
        if thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)


@dataclass(frozen=True)
class Ambience:
    """What torch keeps a thread and a forward depends on: gradients, inference, autocast."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool

    @staticmethod
    def here() -> Ambience:
        """The calling thread's."""
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)
        return Ambience(
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.is_autocast_cache_enabled()
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make it the calling thread's for a while."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            yield


@contextmanager
def same_threads() -> Iterator[None]:
    """Whatever threads set meanwhile, later ones begin with this thread's count: torch keeps a default for new threads a process."""
    try:
        yield
    finally:
        torch.set_num_threads(torch.get_num_threads())


@contextmanager
def intra_op_threads(count: int | None) -> Iterator[None]:
    """Let the calling thread's operators use `count` threads for a while; None changes nothing."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_threads(ranks: int, fn: Callable[[int], Any]) -> list[Any]:
    """fn(rank) of every rank, each on a thread that lives as long as that. Raises the first rank's exception when any has one."""
    workers = [Worker(f"purlin-open-{rank}") for rank in range(ranks)]
    futures = [worker.run(functools.partial(fn, rank)) for rank, worker in enumerate(workers)]
    try:
        return [future.result() for future in futures]
    finally:
        for worker in workers:
            worker.close()
