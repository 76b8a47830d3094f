"""Exchanges beside attention: launched at once on a stream of their own, and waited for where their results are read.

What moves begins behind all that the current stream has been given, and its inputs are held until it has arrived: nobody writes there before. Memory
of the side stream, torch's and the communicator's heap alike, is taken behind such a fork only, and so behind whoever read what lay there before:
results need no record_stream, which would keep a graph's memory from being used again. Whoever starts an exchange waits for it, so that a root call
ends, and a capture, with all streams joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from purlin_core import Communicator
from purlin_core.spec import Sizes
from purlin_diffusion.carrier import Around, Carrier
from purlin_diffusion.config import Overlap

# Keys and values a rank. Three quarters of them move beside attention: of 4 MiB, 10 us at 300 GB/s, and about that takes what one part does not need:
# another launch, the streams that wait for each other, the outputs laid side by side.
LEAST_BYTES = 4 << 20
BLOCKS = 16  # of a GPU: with more the exchange ends sooner, and attention, which lacks them, later
HIGH = -1  # priority of a stream: blocks of an exchange go before those of an attention that wait for a place


@dataclass(frozen=True)
class Moving:
    """An exchange under way, and what it reads. `ended` is None where it has ended in the order of the current stream."""

    inputs: Sequence[Tensor]
    results: list[Tensor]
    ended: torch.cuda.Event | None


class Beside(Around):
    """A carrier that can exchange beside other work; all else is the carrier's own, which this closes.

    `least_bytes`: of keys and values a rank, from which on two exchanges are made of one, the same on every rank. `device`: the GPU on which they
    get a stream; None: an exchange has ended when it has started.
    """

    def __init__(self, carrier: Carrier, least_bytes: int, device: torch.device | None) -> None:
        super().__init__(carrier)
        self.least_bytes = least_bytes
        self._device = device
        self._side: torch.cuda.Stream | None = None  # made by the first exchange: eager, for a capture repeats a call
        self._under_way: list[torch.cuda.Event] = []  # their ends

    @property
    def beside(self) -> Beside:
        return self

    @property
    def how(self) -> str:
        """How gather_kv exchanges, for the report."""
        beside = "" if self._device is None else ", the second beside attention"
        return f"in two parts{beside}" + f", from {self.least_bytes >> 20} MiB a rank on" * (self.least_bytes > 0)

    def start(self, tensors: Sequence[Tensor], specs: Sequence[str], *, sizes: Sizes | None = None) -> Moving:
        """exchange(), whose results arrived() gives. Collective, as exchange() is."""
        if self._device is None:
            return Moving(tensors, self._carrier.exchange(tensors, specs, sizes=sizes), None)
        if self._side is None:
            self._side = torch.cuda.Stream(self._device, priority=HIGH)  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side), self._budget():
            results = self._carrier.exchange(tensors, specs, sizes=sizes)
        self._under_way.append(self._side.record_event())
        return Moving(tensors, results, self._under_way[-1])

    def _budget(self) -> AbstractContextManager[None]:
        """The first that is under way is waited for, and may have the GPU; what comes behind it leaves the GPU to attention."""
        communicator = cast(Communicator, self._carrier)  # who else has a side stream
        return communicator.budget(BLOCKS) if self._under_way else nullcontext()

    def arrived(self, moving: Moving) -> list[Tensor]:
        """The results of an exchange, behind which the current stream is from now on."""
        if moving.ended is not None:
            torch.cuda.current_stream(self._device).wait_event(moving.ended)
            self._under_way.remove(moving.ended)
        return moving.results

    def join(self) -> None:
        """After a failure: the current stream waits for what was started, where it still can."""
        self._under_way.clear()
        if self._side is not None:
            with suppress(RuntimeError):  # a broken context, or a capture that is: what broke it is being raised
                torch.cuda.current_stream(self._device).wait_stream(self._side)

    def exchange(self, tensors: Sequence[Tensor], specs: Sequence[str], *, sizes: Sizes | None = None) -> list[Tensor]:
        """The carrier's own, behind all that is under way: two never run at once, and in a capture nobody else sees to that."""
        if self._under_way:
            torch.cuda.current_stream(self._device).wait_event(self._under_way[-1])
        return self._carrier.exchange(tensors, specs, sizes=sizes)


def beside(carrier: Carrier, overlap: Overlap, *, apart: bool) -> Carrier:
    """`carrier`, able to exchange beside other work where `overlap` wants that, alike on every rank. `apart`: each rank has a device of its own."""
    device = _side_device(carrier)
    if overlap is False or carrier.ranks == 1 or (overlap == "auto" and (device is None or not apart)):
        return carrier
    return Beside(carrier, 0 if overlap is True else LEAST_BYTES, device)


def beside_of(carrier: Carrier) -> Beside | None:
    """The Beside that `carrier` is, or stands around; None where there is none."""
    found: Beside | None = getattr(carrier, "beside", None)
    return found


def _side_device(carrier: Carrier) -> torch.device | None:
    """The GPU on which exchanges of `carrier` may have a stream. Only torch's own allocator keeps what is free by stream."""
    if not isinstance(carrier, Communicator) or carrier.device.type != "cuda":
        return None
    return carrier.device if torch.cuda.get_allocator_backend() == "native" else None
