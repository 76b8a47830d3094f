"""Start ranks as processes of this machine: `launch(draw, 2, prompt)` runs draw(prompt) in each, as torchrun would."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from purlin_core.opening import MAX_RANKS
from purlin_core.settings import overlay
from purlin_diffusion import rank_process
from purlin_diffusion.environment import launched_ranks, of_rank
from purlin_diffusion.errors import LaunchError, RankError
from purlin_diffusion.rank_process import Outcome

GRACE_SECONDS = 5.0  # for the other ranks to notice that one has left, and to end
TERM_SECONDS = 2.0
_AGAIN = 83  # the exit code of a rank that came to launch() itself


@dataclass
class _Started:
    rank: int
    process: SpawnProcess
    outcome: Connection
    said: Outcome | None = None


def launch(fn: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Run fn(*args) in `ranks` processes that form a torch.distributed group (gloo; NCCL where each has a GPU). Returns what each returned.

    ranks: 1 to 16.
    fn: importable, at the top level of a module or of a script under `if __name__ == "__main__":`. Each rank computes with cores // ranks threads.
    Raises LaunchError when ranks cannot be started or one ends without a word, and RankError with the first exception of a rank; the other ranks have
    ended by then, within about 10 s.
    """
    _refuse_ranks()
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise LaunchError(f"launch: `ranks` needs a count of 1 or more; got {ranks!r}.")
    if ranks > MAX_RANKS:
        raise LaunchError(
            f"launch: `ranks` needs at most {MAX_RANKS}, as many as can exchange; got {ranks}. Start fewer."
        )
    work = _work(fn, args)
    with tempfile.TemporaryDirectory(prefix="purlin-launch-") as folder:
        started: list[_Started] = []
        try:
            for rank in range(ranks):
                started.append(_start(rank, ranks, work, Path(folder) / "store"))
            _watch(started)
        finally:
            _end(started)
    failure = _failure(started)
    if failure is not None:
        raise failure from failure.__cause__
    return [each.said.value() for each in started if each.said is not None]


def _refuse_ranks() -> None:
    """A rank launches nothing. One that comes here while it imports the script ends without a word: the process that started it says why."""
    if launched_ranks() is None:
        return
    if multiprocessing.parent_process() is not None:
        raise LaunchError(
            "launch: called inside a rank that launch() has started. Call it in the process that starts them."
        )
    if "__mp_main__" in sys.modules:  # so a new process calls the script, and knows no parent until it has imported it
        raise SystemExit(_AGAIN)


def _work(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        work = pickle.dumps((fn, tuple(args)))
        if problem := _out_of_reach(fn):
            raise LaunchError(problem)
        return work
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise LaunchError(
            f"launch: `fn` and its arguments need to be importable by a new process; got {name} ({error}). {rank_process.CURE}"
        ) from error


def _out_of_reach(fn: Callable[..., Any]) -> str:
    """Why a new process, which runs this program's file again before it looks for `fn`, would not come that far; empty where it would."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None:
        return "its module, __main__, is a notebook or a prompt" * (getattr(fn, "__module__", "") == "__main__")
    if getattr(main, "__spec__", None) is None and not Path(file).is_file():
        return f"this program is no file, but {file}"
    return ""


def _start(rank: int, ranks: int, work: bytes, store: Path) -> _Started:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    process = context.Process(
        target=rank_process.main, args=(theirs, work, rank, ranks, str(store)), name=f"purlin-rank-{rank}"
    )
    with overlay(of_rank(rank, ranks, threads=threads)):
        process.start()
    theirs.close()
    return _Started(rank, process, mine)


def _watch(started: Sequence[_Started]) -> None:
    """Return when all ranks have spoken or ended, or GRACE_SECONDS after the first that failed."""
    deadline: float | None = None
    while waiting := [each for each in started if each.said is None]:
        ready = wait(
            [each.outcome for each in waiting], None if deadline is None else max(0.0, deadline - time.monotonic())
        )
        if not ready:
            return
        for each in waiting:
            if each.outcome in ready:
                each.said = _hear(each)
                if each.said.failed and deadline is None:
                    deadline = time.monotonic() + GRACE_SECONDS


def _hear(each: _Started) -> Outcome:
    try:
        return pickle.loads(each.outcome.recv_bytes())  # type: ignore[no-any-return]
    except (EOFError, OSError):  # it ended without a word
        each.process.join(TERM_SECONDS)
        return Outcome(failed=True, at=time.monotonic(), code=each.process.exitcode)


def _end(started: Sequence[_Started]) -> None:
    """See all processes end: those that said how they fared on their own, others by a signal."""
    for each in started:
        if each.said is None:
            each.process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for each in started:
        each.process.join(max(TERM_SECONDS if each.said is None else 0.1, deadline - time.monotonic()))
        if each.process.is_alive():
            each.process.kill()
            each.process.join()
        each.outcome.close()


def _failure(started: Sequence[_Started]) -> RankError | LaunchError | None:
    """The first failure that is not the echo of another rank's."""
    failed = [(each, each.said) for each in started if each.said is not None and each.said.failed]
    if not failed:
        return None
    each, said = min(failed, key=lambda pair: (pair[1].echo, pair[1].at))
    where = f"rank {each.rank} of {len(started)}"
    if said.code == _AGAIN:
        return LaunchError(
            f"launch: {where} came to launch() itself: a new process imports your script, and with it runs all of its top level. "
            'Call launch() under `if __name__ == "__main__":`.'
        )
    if said.code is not None or not said.text:
        return LaunchError(f"launch: {where} {_ending(said.code)} without a word. What it printed may say why.")
    if said.unfound:
        return LaunchError(f"launch: {where} {said.text}")
    failure = RankError(f"launch: {where}: {said.text}\n\n{said.trace}", each.rank)
    failure.__cause__ = said.exception()
    return failure


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
