"""Which hardware carries a communicator: its native module, its memory, its streams, and how large its inbox is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from purlin_core import _cpu
from purlin_core.cuda import open_cuda
from purlin_core.errors import DeviceError
from purlin_core.lane import Lane
from purlin_core.memory import HostMemory, Provider
from purlin_core.rendezvous import LocalRendezvous, Rendezvous
from purlin_core.tune import Scratch, Tuning, cpu_scratch


class Atom(Protocol):
    """One device of one rank."""

    @property
    def device(self) -> torch.device: ...

    @property
    def native(self) -> Any:
        """purlin_core._cpu, or _cuda: the same names in both, which _cpu.pyi describes."""
        ...

    @property
    def tuning(self) -> Tuning: ...

    @property
    def processors(self) -> int:
        """How many teams can run side by side."""
        ...

    @property
    def identity(self) -> str:
        """The same for two ranks where both are on one device."""
        ...

    def scratch(self, ranks: int, *, teams: int | None, sharing: int) -> Scratch:
        """The device's sizes; `teams`: None for as many as are good where `sharing` ranks are on one device."""
        ...

    def current(self) -> AbstractContextManager[Any]:
        """The device is the thread's current one inside."""
        ...

    def memory(self, meeting: Rendezvous, *, timeout: float) -> Provider[Any]:
        """Where arenas of the ranks of `meeting` come from."""
        ...

    def lane(self) -> Lane | None: ...


@dataclass(frozen=True)
class Host:
    """The CPU."""

    device = torch.device("cpu")
    native = _cpu
    tuning = Tuning.host()
    processors = 1 << 30  # teams take turns
    identity = ""  # any number of ranks are on it

    def scratch(self, ranks: int, *, teams: int | None, sharing: int) -> Scratch:
        return cpu_scratch(ranks, teams=teams or 1)

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def memory(self, meeting: Rendezvous, *, timeout: float) -> HostMemory:
        return HostMemory(local=isinstance(meeting, LocalRendezvous))

    def lane(self) -> None:
        return None


def device_of(device: torch.device | str) -> torch.device:
    """`device` with its index, where it has one: "cuda" is the current GPU. Raises DeviceError."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"Communicator: `device` needs to be a torch device; got {device!r}.") from error
    if str(found) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found


def atom_of(device: torch.device | str) -> Atom:
    """The Atom of a device. Raises DeviceError where it cannot be used, saying why and the cure."""
    found = device_of(device)
    if found.type == "cpu":
        return Host()
    if found.type == "cuda":
        return open_cuda(found)
    raise DeviceError(f"Communicator: `device` needs to be 'cpu' or 'cuda', or 'cuda:0' and so on; got '{found}'.")
