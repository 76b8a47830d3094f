"""PURLIN_CHECK=1: a pattern behind every region that peers write, looked at after each call, and outputs that show a byte nobody wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from purlin_core.errors import PurlinError
from purlin_core.heap import Heap
from purlin_core.memory import GUARD_BYTES, Arena

_UNWRITTEN = 0xA5


class Canaries:
    """Of one rank's own arena: `behind` says what each ends, by offset; and one behind every tensor of its heap."""

    def __init__(self, arena: Arena, behind: Mapping[int, str], heap: Heap) -> None:
        self._arena, self._behind, self._heap = arena, behind, heap
        self._pattern = torch.tensor([0xC0 | i % 16 for i in range(GUARD_BYTES)], dtype=torch.uint8).to(arena.device)
        self._fed: set[int] = set()  # heap tensors whose canary has been set
        for end in behind:
            self._set(end)

    def feed(self) -> None:
        """Set those behind new tensors of the heap."""
        live = self._heap.guards()
        for end in live - self._fed:
            self._set(end)
        self._fed = live

    def look(self, call: str) -> None:
        """Raise PurlinError when something behind a region has been overwritten. On a GPU this waits for the call."""
        behind = dict(self._behind) | dict.fromkeys(self._fed & self._heap.guards(), "a tensor of the heap")
        for end, region in behind.items():
            if not torch.equal(self._at(end), self._pattern):
                raise PurlinError(
                    f"{call}: bytes behind {region} were overwritten, at {end:#x} of this rank's arena. "
                    "Either something wrote past a tensor of empty(), or this is a defect of purlin: please report it with this line."
                )

    def _set(self, end: int) -> None:
        self._at(end).copy_(self._pattern)

    def _at(self, end: int) -> Tensor:
        return self._arena.window(end, GUARD_BYTES)[0]


def poison(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Fill outputs with a pattern, except those that share storage with an input: an exchange in place reads them."""
    read = {x.untyped_storage().data_ptr() for x in inputs}
    for out in outputs:
        if out.untyped_storage().data_ptr() not in read:
            one = torch.full((out.element_size(),), _UNWRITTEN, dtype=torch.uint8, device=out.device).view(out.dtype)
            out.copy_(one.expand(out.shape))
