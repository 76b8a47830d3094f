"""Threads that hold the ranks of one process, other than its root. They end when their Worker is closed or collected."""

from __future__ import annotations

import contextvars
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

from purlin_diffusion.compiler import Compiler, paused_compiler

_Job: TypeAlias = "tuple[Callable[[], Any], Future[Any]] | None"
JOIN_SECONDS = 5.0
_KERNELS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


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
        """Start `job` when those before it are done, in a copy of the caller's context, where torch keeps its settings. Its exception comes out of
        the future."""
        future: Future[Any] = Future()
        self._jobs.put((functools.partial(contextvars.copy_context().run, job), future))
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
    """What torch keeps a thread and a forward depends on: gradients, inference, autocast, and what compiles a root call as a whole."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    compiler: Compiler = None

    @staticmethod
    def here() -> Ambience:
        """The calling thread's."""
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)
        return Ambience(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
            torch.is_autocast_cache_enabled(),
            paused_compiler(),
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
def same_kernels() -> Iterator[None]:
    """Whatever threads leave behind, attention may use the kernels that it may now. diffusers' `_native_*` backends choose some for a call, torch
    keeps the choice a process, and of threads that call at once one may put back what another has chosen."""
    before = [is_on() for is_on, _ in _KERNELS]
    try:
        yield
    finally:
        for (_, enable), on in zip(_KERNELS, before, strict=True):
            enable(on)


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
