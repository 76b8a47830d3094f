"""Outputs that peers may be granted: a first-fit allocator over a part of the arena. Freeing is local: when a tensor dies, its bytes are free.

On a GPU they are given to the next tensor at once, which is right in the order of one stream. Unlike torch's allocator this one does not tell
streams apart: who makes or uses tensors on several lets them wait for one another.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from purlin_core.errors import ClosedError, ShapeError
from purlin_core.memory import GUARD_BYTES, Arena, address_of

HEAP_ALIGN = 128  # bytes


class Heap:
    """Tensors in bytes [at, at + size) of an arena. `guarded`: with GUARD_BYTES behind each."""

    def __init__(self, arena: Arena, at: int, size: int, *, guarded: bool = False) -> None:
        self._arena: Arena | None = arena
        self._guard_bytes = GUARD_BYTES if guarded else 0
        self._ends: dict[int, int] = {}  # offset -> end of the tensor there, of the living when guarded
        self._free = [(at, size)] if size else []  # (offset, bytes), by offset
        self._returned: deque[tuple[int, int]] = deque()  # by finalisers, which may run at any moment and on any thread
        self.lo = arena.address + at
        self.hi = self.lo + size

    def holds_all(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Can all of these be granted?"""
        for tensor in tensors:  # noqa: SIM110 - calls ask, and a generator is what costs
            if not (self.lo <= address_of(tensor) < self.hi and tensor.is_contiguous()):
                return False
        return True

    def close(self) -> None:
        """No more tensors; those that live keep the arena, and nothing else here does."""
        self._arena = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the arena. Raises ShapeError when no hole is large enough, and ClosedError after close()."""
        if self._arena is None:
            raise ClosedError("empty: the heap is closed.")
        if any(extent < 0 for extent in shape):
            raise ShapeError(f"empty: `shape` needs extents of 0 or more; got {tuple(shape)}.")
        wanted = math.prod(shape) * dtype.itemsize
        taken = -(-max(wanted + self._guard_bytes, 1) // HEAP_ALIGN) * HEAP_ALIGN
        offset = self._take(taken)
        self._ends[offset] = offset + wanted
        flat, keeper = self._arena.window(offset, taken)
        weakref.finalize(keeper, self._returned.append, (offset, taken)).atexit = False
        del keeper
        return flat[:wanted].view(dtype).view(tuple(shape))

    def guards(self) -> set[int]:
        """Where the living tensors of a guarded heap end: GUARD_BYTES behind each are nobody's."""
        self._merge()
        return set(self._ends.values()) if self._guard_bytes else set()

    def _take(self, taken: int) -> int:
        self._merge()
        for i, (offset, size) in enumerate(self._free):
            if size >= taken:
                self._free[i : i + 1] = [(offset + taken, size - taken)] if size > taken else []
                return offset
        most = max((size for _, size in self._free), default=0)
        raise ShapeError(
            f"empty: {taken} bytes are wanted and the largest hole of the heap has {most}. "
            "Pass a larger heap_bytes to the communicator, or call reserve() on every rank before the first empty()."
        )

    def _merge(self) -> None:
        """Holes that touch become one."""
        holes = self._free
        while self._returned:
            holes.append(self._returned.popleft())
            del self._ends[holes[-1][0]]
        holes.sort()
        self._free = holes[:1]
        for at, extent in holes[1:]:
            last, before = self._free[-1]
            if last + before == at:
                self._free[-1] = (last, before + extent)
            else:
                self._free.append((at, extent))
