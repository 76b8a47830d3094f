"""CPU tensors over a carrier of another device: there and back, for what Python has to read where a caller brings one communicator only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from purlin_core.spec import Sizes
from purlin_diffusion.carrier import Around, Carrier


class HostCarrier(Around):
    """The same rank and the same calls as `carrier`, which belongs to the caller; the host waits for the device in each."""

    def __init__(self, carrier: Carrier, device: torch.device) -> None:
        super().__init__(carrier)
        self._device = device

    def exchange(self, tensors: Sequence[Tensor], specs: Sequence[str], *, sizes: Sizes | None = None) -> list[Tensor]:
        """Communicator.exchange, of CPU tensors."""
        there = [x.to(self._device) for x in tensors]
        back = [y.cpu() for y in self._carrier.exchange(there, specs, sizes=sizes)]
        self._carrier.check()  # the device is done, so it has said what it met
        return back

    def close(self) -> None:
        """The carrier is the caller's to close."""
