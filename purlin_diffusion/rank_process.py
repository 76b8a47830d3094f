"""What launch() runs in each process it starts."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How a rank fared. `at` is the machine's monotonic clock; `code` is set for a process that ended without a word."""

    failed: bool
    at: float
    text: str = ""
    trace: str = ""
    echo: bool = False  # the failure of another rank, as this one met it
    unfound: bool = False  # the function could not be imported there
    payload: bytes = b""
    code: int | None = None

    def value(self) -> Any:
        """What the function returned."""
        return pickle.loads(self.payload)

    def exception(self) -> BaseException | None:
        """What it raised; None when that could not travel."""
        try:
            return pickle.loads(self.payload)  # type: ignore[no-any-return]
        except Exception:
            return None


CURE = "Write the function at the top level of a module and import it; or stay in this process: parallelize(pipe, devices=n)."


def main(outcome: Connection, work: bytes, rank: int, ranks: int, store: str) -> None:
    """Join the group, run the function, say how it went."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        try:
            fn, args = pickle.loads(work)
        except Exception as error:
            raise _UnfoundError(
                f"cannot import `fn` or its arguments: {type(error).__name__}: {error}. {CURE}"
            ) from error
        _join(rank, ranks, store)
        said = Outcome(failed=False, at=time.monotonic(), payload=pickle.dumps(fn(*args)))
    except BaseException as error:
        said = _failed(error)
    outcome.send_bytes(pickle.dumps(said))
    outcome.close()
    if said.failed:
        sys.stdout.flush()
        os._exit(1)  # a group whose peers are gone may not be torn down
    _leave()


class _UnfoundError(Exception):
    """What launch() was given does not exist in a new process."""


def _failed(error: BaseException) -> Outcome:
    if isinstance(error, _UnfoundError):
        return Outcome(failed=True, at=time.monotonic(), text=str(error), unfound=True)
    from purlin_core.errors import PeerError

    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        payload = b""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    text = f"{type(error).__name__}: {error}"
    return Outcome(
        failed=True, at=time.monotonic(), text=text, trace=trace, echo=isinstance(error, PeerError), payload=payload
    )


def _join(rank: int, ranks: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    from purlin_diffusion.stores import FileStore

    gpus = torch.cuda.device_count() >= ranks
    if gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks
    )
    # A rank that ended would close its connections while others still make theirs. Not barrier(): that would wake NCCL, which few need.
    dist.all_reduce(torch.zeros(1, device="cpu"))


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
