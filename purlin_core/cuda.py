"""The Atom of a GPU, and why a GPU cannot be used: each reason by name, with its cure."""

from __future__ import annotations

import ctypes
import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from purlin_core.cuda_memory import ProcessMemory, ThreadMemory
from purlin_core.errors import DeviceError
from purlin_core.lane import Lane
from purlin_core.rendezvous import LocalRendezvous, Rendezvous, StoreRendezvous
from purlin_core.tune import Scratch, Tuning, cuda_scratch

OLDEST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Cuda:
    """One GPU."""

    device: torch.device  # with its index
    native: Any  # purlin_core._cuda
    tuning: Tuning
    identity: str  # its UUID
    processors: int

    def scratch(self, ranks: int, *, teams: int | None, sharing: int) -> Scratch:
        scratch = cuda_scratch(ranks)
        most = max(1, self.processors // sharing)  # a team is a block, and all of them must be resident at once
        return replace(scratch, teams=teams or min(scratch.teams, most))

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def memory(self, meeting: Rendezvous, *, timeout: float) -> ThreadMemory | ProcessMemory:
        if isinstance(meeting, LocalRendezvous):
            return ThreadMemory(self.native, self.device)
        if isinstance(meeting, StoreRendezvous):
            return ProcessMemory(self.device, meeting.own_store("memory"), meeting.ranks, timeout)
        raise DeviceError(
            "Communicator: processes on GPUs need a torch store to share memory; got a rendezvous without one. Pass a group or a Store."
        )

    def lane(self) -> Lane:
        return Lane(self.device)


def open_cuda(device: torch.device) -> Cuda:
    """Raises DeviceError."""
    native = _module()
    _check_driver()
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise DeviceError(
            f"Communicator: there is no '{device}'; torch sees {count} GPU(s). Look at CUDA_VISIBLE_DEVICES."
        )
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if capability < OLDEST_CAPABILITY:
        raise DeviceError(
            f"Communicator: '{device}' ({properties.name}) is sm_{capability[0]}{capability[1]}; purlin needs sm_80 (Ampere) or newer."
        )
    tuning = Tuning.of_gpu(properties.name)
    return Cuda(torch.device("cuda", index), native, tuning, str(properties.uuid), properties.multi_processor_count)


def _module() -> Any:
    try:
        return importlib.import_module("purlin_core._cuda")
    except ModuleNotFoundError as error:
        raise DeviceError(
            "Communicator: purlin_core was built without CUDA, so it has CPU ranks only. "
            "Build it where nvcc 12.8 or newer is: PURLIN_CUDA=ON pip install ."
        ) from error
    except ImportError as error:
        raise DeviceError(f"Communicator: purlin_core._cuda does not load: {error}") from error


def _check_driver() -> None:
    """The CUDA runtime gives one answer (35) to a driver that is too old and to none at all; the driver's version tells them apart."""
    built_for = torch.version.cuda
    if built_for is None:
        raise DeviceError(f"Communicator: this torch ({torch.__version__}) is a CPU build. Install a CUDA build.")
    if torch.cuda.is_available():
        return
    version = _driver_version()
    if version == 0:
        raise DeviceError(
            "Communicator: no NVIDIA driver is loaded. With an NVIDIA GPU, install its driver; else use 'cpu'."
        )
    if version // 1000 < int(built_for.partition(".")[0]):
        raise DeviceError(
            f"Communicator: the NVIDIA driver is too old: it knows CUDA {version // 1000}.{version % 1000 // 10}, and torch was built "
            f"for {built_for}. Install a newer driver (580 or newer for CUDA 13), or builds for an older CUDA."
        )
    raise DeviceError(
        "Communicator: torch sees no GPU. Look at CUDA_VISIBLE_DEVICES, and give a container its GPUs; else use 'cpu'."
    )


def _driver_version() -> int:
    """The newest CUDA that the driver knows, as 1000 * major + 10 * minor; 0 without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value
