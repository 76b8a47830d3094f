"""Ranks that are processes, forked in milliseconds from one server that has torch loaded. Nothing here waits without a bound."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from purlin_core import Communicator

T = TypeVar("T")
LIMIT = 60.0  # seconds for everything a test lets its processes do

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["torch", "torch.distributed", "purlin_core", "pytest"])


class Processes:
    """`ranks` processes, each at fn(rank, *arguments). fn is a module's function, and what it returns can be pickled.

    Leaving the `with` kills what still runs.
    """

    def __init__(self, ranks: int, fn: Callable[..., Any], *arguments: Any) -> None:
        pipes = [_server.Pipe(duplex=False) for _ in range(ranks)]
        self._answers = [receive for receive, _ in pipes]
        self._processes = [
            _server.Process(target=_work, args=(send, fn, rank, arguments), daemon=True)
            for rank, (_, send) in enumerate(pipes)
        ]
        for process, (_, send) in zip(self._processes, pipes, strict=True):
            process.start()
            send.close()

    def answer(self, rank: int, *, within: float = LIMIT) -> Any:
        """What fn returned on `rank`. Raises AssertionError with its traceback when it raised, or ended without a word, or took too long."""
        if not self._answers[rank].poll(within):
            raise AssertionError(f"rank {rank} gave no answer within {within:g} s")
        try:
            answer = self._answers[rank].recv()
        except EOFError as error:
            raise AssertionError(f"rank {rank} ended without an answer") from error
        if isinstance(answer, _Raised):
            raise AssertionError(f"rank {rank} raised\n{answer.traceback}")
        return answer

    def answers(self) -> list[Any]:
        deadline = time.monotonic() + LIMIT
        return [self.answer(rank, within=max(0.0, deadline - time.monotonic())) for rank in range(len(self._answers))]

    def exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(LIMIT)
        return self._processes[rank].exitcode

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self._processes[rank].pid or 0, number)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(LIMIT)


@dataclass(frozen=True)
class _Raised:
    traceback: str


def _work(answer: Connection, fn: Callable[..., Any], rank: int, arguments: Sequence[Any]) -> None:
    try:
        result = fn(rank, *arguments)
    except BaseException:
        result = _Raised(traceback.format_exc())
    answer.send(result)


@dataclass(frozen=True)
class Meeting:
    """Where the processes of a test find each other: a torch store, and a folder for marks."""

    ranks: int
    port: int
    folder: Path

    @staticmethod
    @contextmanager
    def of(ranks: int, folder: Path) -> Iterator[Meeting]:
        server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        yield Meeting(ranks, server.port, folder)

    def communicator(self, rank: int, *, name: str = "", ranks: int = 0, **arguments: Any) -> Communicator:
        """Of all ranks; or of `ranks`, with a `name` of its own."""
        arguments = {"timeout": LIMIT / 2, "setup_timeout": LIMIT / 2, **arguments}
        return Communicator(self.store(name), rank=rank, ranks=ranks or self.ranks, **arguments)

    def store(self, name: str = "") -> Store:
        store = TCPStore("localhost", self.port, is_master=False, timeout=timedelta(seconds=LIMIT))
        return PrefixStore(name, store) if name else store

    def mark(self, name: str) -> None:
        """Tell the test, or another rank, that something has been reached."""
        (self.folder / name).touch()

    def await_mark(self, name: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not (self.folder / name).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody made {name}")
            time.sleep(0.002)
