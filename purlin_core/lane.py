"""The CUDA streams of one rank's calls: one at a time, and where it changes an event keeps the order."""

from __future__ import annotations

import time

import torch

_LOOK_SECONDS = 0.0002


class Lane:
    """Of one communicator on `device`, which has an index."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index
        self._stream: torch.cuda.Stream | None = None  # of the latest call that was not captured
        self._raw = -1
        # torch's own functions below its Python ones: each call makes the first, and off the default stream all three
        self._current = torch._C._cuda_getCurrentRawStream
        self._current_device = torch._C._cuda_getDevice
        self._current_captured = torch._C._cuda_isCurrentStreamCapturing
        self.captured = False  # was the latest call captured into a graph, and not run?

    def enter(self) -> int:
        """The stream that is current on the device, as an integer; behind all calls before.

        What is captured runs when its graph is replayed: who replays it orders that, as with every kernel.
        """
        raw: int = self._current(self._index)
        self.captured = raw != 0 and self.capturing()  # CUDA captures no default stream
        if raw != self._raw and not self.captured:
            self._move(raw)
        return raw

    def capturing(self) -> bool:
        """Is the current stream of the device being captured?"""
        if self._current_device() == self._index:
            return self._current_captured()
        with torch.cuda.device(self._device):
            return self._current_captured()

    def settled(self, timeout: float) -> bool:
        """Wait until all calls have ended, at most `timeout` seconds; False when they have not, or when a capture forbids to look."""
        if self._stream is None:
            return True
        if self.capturing():
            return False
        deadline = time.monotonic() + timeout
        try:
            ended = self._stream.record_event()
            while not ended.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(_LOOK_SECONDS)
        except RuntimeError:  # the CUDA context is broken, by whatever: nothing runs in it any more
            return True
        return True

    def _move(self, raw: int) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._stream, self._raw = stream, raw
