"""What records a call and runs it again. cuda.py holds the real one; a test's runs the body again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Recorder(Protocol):
    """One recording."""

    def record(self, body: Callable[[], T], *, ready: Callable[[], None]) -> T:
        """body(), recorded. What it returns has values after replay() only. `ready` is called when nothing else is left to do before.

        Raises what body and `ready` raise, and RuntimeError where it cannot be recorded; nothing has run then, and there is nothing to free.
        """

    def replay(self) -> None:
        """Run what was recorded, once, on what lies in its inputs now; in the order of the stream that is current."""

    def free(self) -> None:
        """Let go of it."""


class Pool(Protocol):
    """The memory of one rank's recordings, which they share: they run one after the other, and what they return is copied at once."""

    device: torch.device

    def recorder(self) -> Recorder: ...

    def prepare(self, stream: Any) -> None:
        """On the thread that will record, or take part: make what would else be made while recording, for `stream` (None: the pool's own)."""

    def branch(self) -> Any:
        """A stream for a rank that takes part in a recording of another; None where there are no streams."""

    def turn(self) -> AbstractContextManager[None]:
        """Around what a replay does to its inputs and outputs: behind the replay before, on whatever stream that was."""

    @property
    def used_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int:
        """What the device has left."""

    def release(self) -> None:
        """Give memory back, when there is no recording left."""


# Makes the pool of a rank on a device.
MakePool = Callable[[torch.device], Pool]
