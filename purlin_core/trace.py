"""Who staged, notified and consumed, and when: `with purlin_core.trace("out/trace.json"): pipe(...)`, then open the file at ui.perfetto.dev."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from purlin_core import ops
from purlin_core.chrome import chrome
from purlin_core.errors import ArgumentTypeError, ConcurrentUseError, FileError
from purlin_core.files import in_folder, try_place
from purlin_core.recorder import Recorder

if TYPE_CHECKING:
    from purlin_core.communicator import Communicator

ACTS = 1 << 16  # kept of each rank, about 6 MiB; and as many calls


class Trace:
    """What is being recorded, of every rank of this process. `file` is what was written, once the trace has ended."""

    def __init__(self, path: Path, acts: int) -> None:
        self.path, self._acts = path, acts
        self.recorders: list[Recorder] = []
        self.file = path

    @property
    def lost(self) -> int:
        """Acts and calls that had to make room for later ones."""
        return sum(recorder.lost for recorder in self.recorders)

    def join(self, communicator: Communicator) -> None:
        recorder = communicator.recorded(self._acts)
        if recorder is not None:
            self.recorders.append(recorder)

    def write(self) -> None:
        """Raises FileError."""
        self.file = self.path if (rank := self._process_rank()) is None else _of_rank(self.path, rank)
        try:
            in_folder(self.file).write_text(json.dumps(chrome(self.recorders)))
        except OSError as error:
            raise _cannot(self.file, error) from error

    def _process_rank(self) -> int | None:
        """Which of several processes this is."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return dist.get_rank()
        return next((each.rank for each in self.recorders if each.alone), None)


# One at a time a process, for communicators are made anywhere in it, and those made while a trace is open belong to it.
_lock = threading.Lock()
_open: list[Trace] = []


@contextmanager
def trace(path: str | Path, *, acts: int = ACTS) -> Iterator[Trace]:
    """Record what every rank of this process does inside, and write it to `path` as a Chrome trace, which Perfetto shows.

    A rank is a process there, with a track for calls, named by their specs, and one for each role of each team: slices for what it staged, waited
    for and consumed, arrows from each notify to the expect that it released. Launched processes write a file each, PATH.rank0.json and so on; their
    clock is the machine's. `acts`: how many are kept of each rank, the newest; how many are lost stands in the file, and in `.lost` of what this
    gives. An exception inside passes, and the file is written.

    What torch.distributed carries is not seen. Not to be opened while a CUDA graph is being captured.

    On a GPU only what the host sees is recorded: when a call was enqueued, and by CUDA events when its kernel, and what stood before it on
    its stream, had begun and ended. Kernels look at no clock, and replays of a CUDA graph are not seen. The file says so too.

    Raises ConcurrentUseError while another trace of this process is open; FileError where the file cannot be, before anything runs inside. Should it
    be lost later, on a disk that has become full, what ran is raised or FileError.
    """
    if isinstance(acts, bool) or not isinstance(acts, int) or acts < 1:
        raise ArgumentTypeError(f"trace: `acts` needs a count of 1 or more; got {acts!r}.")
    recording = Trace(_place(path), acts)
    _begin(recording)
    try:
        yield recording
    except BaseException:
        _end(recording)
        with suppress(FileError):  # what ran inside is what matters
            recording.write()
        raise
    _end(recording)
    recording.write()


def joined(communicator: Communicator) -> None:
    """A communicator has been tied to its peers: an open trace records it."""
    with _lock:
        for recording in _open:
            recording.join(communicator)


def _begin(recording: Trace) -> None:
    with _lock:
        if _open:
            raise ConcurrentUseError(f"trace: a trace to '{_open[0].path}' is open in this process. End it first.")
        _open.append(recording)
        for communicator in ops.living():
            recording.join(communicator)


def _end(recording: Trace) -> None:
    with _lock:
        _open.remove(recording)
    for recorder in recording.recorders:
        recorder.stop()


def _place(path: str | Path) -> Path:
    """Where to write, tried. Raises ArgumentTypeError and FileError."""
    try:
        where = Path(path)
    except TypeError:
        raise ArgumentTypeError(
            f"trace: `path` needs a path; got {path!r:.80} of type {type(path).__name__}."
        ) from None
    try:
        try_place(where)
    except (OSError, ValueError) as error:  # the second of a zero in a name
        raise _cannot(where, error) from error
    return where


def _cannot(file: Path, error: Exception) -> FileError:
    why = getattr(error, "strerror", None) or error
    return FileError(
        f"trace: `path` needs the name of a file that can be written; got {str(file)!r}: {why}. Pass another."
    )


def _of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
