"""Memory that peers can write, and the small interface behind which it lies: each rank makes its own, tells the others of it, and maps theirs.

This file holds the interface and the memory of the host; cuda_memory.py that of a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from purlin_core.errors import SetupError

GUARD_BYTES = 64  # that nobody writes, behind a region


class Arena(Protocol):
    """A piece of zeroed memory of one rank, kept while anything refers to it or to a window of it."""

    address: int
    bytes: int
    device: torch.device

    def window(self, at: int, size: int) -> tuple[Tensor, object]:
        """Bytes [at, at + size) as a tensor (uint8), and an object that lives as long as that tensor or any view of it."""
        ...

    def forget(self) -> None:
        """Set-up is over: no peer will map it any more. What is mapped stays."""
        ...


A = TypeVar("A", bound=Arena)


class Provider(Protocol[A]):
    """Where arenas come from."""

    def make(self, size: int) -> A:
        """This rank's own. Raises RuntimeError or OSError."""
        ...

    def tell(self, own: A) -> Any:
        """What the others need to know to map it: JSON, or anything where ranks are threads."""
        ...

    def map(self, own: A, rank: int, told: Sequence[Any], pids: Sequence[int]) -> Sequence[Addressed]:
        """Everyone's arena, in rank order, as this rank can reach it. Raises SetupError."""
        ...


class Addressed(Protocol):
    """Memory of a peer, mapped while anything refers to this."""

    @property
    def address(self) -> int: ...


class Segment:
    """An arena on the host."""

    device = torch.device("cpu")

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
        """Memory other processes of this user can map by (pid, fd) until forget().

        A memfd: it has no name, so nothing can be left behind, and no size limit of its own, unlike /dev/shm in a container.
        """
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

    def window(self, at: int, size: int) -> tuple[Tensor, object]:
        view = memoryview(self.mapping)[at : at + size]
        return torch.frombuffer(view, dtype=torch.uint8), view

    def forget(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class HostMemory:
    """Segments: between threads of one process (`local`), or between processes."""

    def __init__(self, *, local: bool) -> None:
        self._local = local

    def make(self, size: int) -> Segment:
        return Segment.private(size) if self._local else Segment.shared(size)

    def tell(self, own: Segment) -> Any:
        return own if self._local else own.fd

    def map(self, own: Segment, rank: int, told: Sequence[Any], pids: Sequence[int]) -> Sequence[Segment]:
        if self._local:
            return list(told)
        return [
            own if r == rank else Segment.of_peer(pid, fd, own.bytes)
            for r, (pid, fd) in enumerate(zip(pids, told, strict=True))
        ]


def address_of(tensor: Tensor) -> int:
    """Where a tensor begins; for one without elements, where its storage does; 0 for one without storage, which no call can use."""
    try:
        return tensor.data_ptr() or tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0
