"""Memory of a GPU that peers can write: between threads of one process by peer access, between processes by torch's symmetric memory.

Never by legacy CUDA IPC on memory of torch's allocator, and never with multicast.
"""

from __future__ import annotations

import importlib
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from purlin_core.errors import SetupError
from purlin_core.settings import plain_rendezvous


class DeviceArena:
    """`size` bytes at `address` of `device`, which live as long as `keeper` does."""

    def __init__(self, address: int, size: int, device: torch.device, keeper: object) -> None:
        self.address, self.bytes, self.device = address, size, device
        self.keeper = keeper

    def window(self, at: int, size: int) -> tuple[Tensor, object]:
        piece = _Piece(self, self.address + at, size)
        return torch.as_tensor(piece, device=self.device), piece

    def forget(self) -> None:
        """Nothing to do: what peers have mapped they keep."""


class _Piece:
    """Bytes of an arena as torch.as_tensor() takes them; a tensor made of them keeps this alive, and this the arena."""

    def __init__(self, arena: DeviceArena, address: int, size: int) -> None:
        self.arena = arena
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


@dataclass(frozen=True)
class ThreadMemory:
    """Of the threads of one process, on one GPU or on several that reach each other. `native` is purlin_core._cuda."""

    native: Any
    device: torch.device

    def make(self, size: int) -> DeviceArena:
        memory = self.native.Memory(size)
        return DeviceArena(memory.address, size, self.device, memory)

    def tell(self, own: DeviceArena) -> Any:
        return own

    def map(self, own: DeviceArena, rank: int, told: Sequence[Any], pids: Sequence[int]) -> Sequence[DeviceArena]:
        devices = sorted({there.device.index for there in told})
        for one in devices:  # every rank looks at all pairs, so that all ranks say the same
            for other in devices:
                if one != other and not self.native.can_reach(one, other):
                    raise no_access(one, other)
        for other in devices:
            if other != own.device.index:
                self.native.reach(other)
        return list(told)


@dataclass(frozen=True)
class ProcessMemory:
    """Of processes, a GPU each: torch's symmetric memory, one allocation a communicator. `store` is this communicator's alone."""

    device: torch.device
    store: Store
    ranks: int
    timeout: float  # seconds

    def make(self, size: int) -> DeviceArena:
        memory = _symmetric().empty_strided_p2p((size,), (1,), torch.uint8, self.device)
        memory.zero_()
        torch.cuda.synchronize(self.device)
        return DeviceArena(memory.data_ptr(), size, self.device, memory)

    def tell(self, own: DeviceArena) -> Any:
        return uuid.uuid4().hex  # rank 0's becomes the group's name: torch keeps one table of names a process

    def map(self, own: DeviceArena, rank: int, told: Sequence[Any], pids: Sequence[int]) -> Sequence[Mapped]:
        name, symmetric = f"purlin-{told[0]}", _symmetric()
        steps = _Steps(PrefixStore(name, self.store), self.timeout)
        symmetric.set_group_info(name, rank, self.ranks, steps)
        try:
            with plain_rendezvous(), _known_group(name, steps, rank, self.ranks):
                handle = symmetric.rendezvous(own.keeper, name)
        except (RuntimeError, DistError) as error:
            raise SetupError(f"Communicator: torch's symmetric memory on {self.device} failed: {error}") from error
        return [Mapped(address, (handle, steps)) for address in handle.buffer_ptrs]


@dataclass(frozen=True)
class Mapped:
    """A peer's arena in this process, mapped as long as `keeper` lives."""

    address: int
    keeper: object


def no_access(one: int, other: int) -> SetupError:
    return SetupError(
        f"Communicator: GPU {one} cannot reach the memory of GPU {other} (no P2P). Use GPUs under one NVLink switch or bridge; "
        "in a container or VM, allow P2P and turn IOMMU/ACS off."
    )


@contextmanager
def _known_group(name: str, store: Store, rank: int, ranks: int) -> Iterator[None]:
    """Some versions of torch look for the store of a rendezvous in a process group of its name: one without a backend will do."""
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    group = c10d.ProcessGroup(store, rank, ranks)
    c10d._register_process_group(name, group)
    try:
        yield
    finally:
        c10d._unregister_process_group(name)


def _symmetric() -> Any:
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory


class _Steps(Store):
    """A store for one rendezvous, bounded in time.

    torch puts a number into each key that counts every rendezvous of the process, whatever its group. Processes that took part in different groups
    would wait for each other's keys for ever. Here the numbers of a rendezvous begin at 0 on every rank.
    """

    def __init__(self, store: Store, timeout: float) -> None:
        super().__init__()
        self._store = store
        self._timeout = timedelta(seconds=timeout)
        self._numbers: dict[str, int] = {}
        self.set_timeout(self._timeout)

    def _key(self, key: str) -> str:
        """The first number between slashes, counted anew."""

        def anew(found: re.Match[str]) -> str:
            return f"/{self._numbers.setdefault(found[1], len(self._numbers))}"

        return re.sub(r"/(\d+)(?=/|$)", anew, key, count=1)

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._key(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, number: int) -> int:
        return self._store.add(self._key(key), number)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait([self._key(key) for key in keys], timeout or self._timeout)
