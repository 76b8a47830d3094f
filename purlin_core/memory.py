"""Memory that peers can write: one arena a rank, and the heap in it from which outputs are granted.

Between processes it is a memfd: it has no name, so nothing can be left behind, and no size limit of its own, unlike /dev/shm in a container.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from purlin_core.errors import SetupError, ShapeError

HEAP_ALIGN = 128  # bytes
GUARD_BYTES = 64  # that nobody writes, behind a region


class Segment:
    """A piece of memory, mapped while anything refers to it."""

    def __init__(self, mapping: mmap.mmap, fd: int | None = None) -> None:
        self.mapping = mapping
        self.bytes = len(mapping)
        self.fd = fd
        self._first = ctypes.c_char.from_buffer(mapping)
        self.address = ctypes.addressof(self._first)

    @staticmethod
    def private(size: int) -> Segment:
        """Memory of this process alone, for ranks that are its threads."""
        return Segment(mmap.mmap(-1, size))

    @staticmethod
    def shared(size: int) -> Segment:
        """Memory other processes of this user can map by (pid, fd) until forget()."""
        fd = os.memfd_create("purlin", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        return Segment(mmap.mmap(fd, size), fd)

    @staticmethod
    def of_peer(pid: int, fd: int, size: int) -> Segment:
        """Map a peer's shared segment. Raises SetupError when the system does not let this process see the peer's."""
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SetupError(
                f"cannot map the memory of process {pid}: {error.strerror}. Ranks must be processes of one user that see each other "
                "(one container, one pid namespace)."
            ) from error
        try:
            return Segment(mmap.mmap(opened, size))
        finally:
            os.close(opened)

    def forget(self) -> None:
        """Close the file behind a shared segment; the mappings stay."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def address_of(tensor: torch.Tensor) -> int:
    """Where a tensor begins; for one without elements, where its storage does; 0 for one without storage, which no call can use."""
    try:
        return tensor.data_ptr() or tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


class Heap:
    """Outputs that peers may be granted: a first-fit allocator over a part of the arena. Freeing is local: when a tensor dies, its bytes are free."""

    def __init__(self, segment: Segment, at: int, size: int, *, guarded: bool = False) -> None:
        self._segment = segment
        self._guard_bytes = GUARD_BYTES if guarded else 0  # behind each tensor
        self._ends: dict[int, int] = {}  # offset -> end of the tensor there, of the living when guarded
        self._free = [(at, size)] if size else []  # (offset, bytes), by offset
        self._returned: deque[tuple[int, int]] = deque()  # by finalisers, which may run at any moment and on any thread
        self.lo = segment.address + at
        self.hi = self.lo + size

    def holds_all(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Can all of these be granted?"""
        return all(self._holds(t) and t.is_contiguous() for t in tensors)

    def _holds(self, tensor: torch.Tensor) -> bool:
        return self.lo <= address_of(tensor) < self.hi

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the arena. Raises ShapeError when no hole is large enough."""
        if any(extent < 0 for extent in shape):
            raise ShapeError(f"empty: `shape` needs extents of 0 or more; got {tuple(shape)}.")
        wanted = math.prod(shape) * dtype.itemsize
        taken = -(-max(wanted + self._guard_bytes, 1) // HEAP_ALIGN) * HEAP_ALIGN
        offset = self._take(taken)
        self._ends[offset] = offset + wanted
        window = memoryview(self._segment.mapping)[offset : offset + taken]
        weakref.finalize(window, self._returned.append, (offset, taken)).atexit = False
        flat = torch.frombuffer(window, dtype=torch.uint8)
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
