"""Collectives named by specs over one protocol: who holds what before, who holds what after, and how the bytes come together."""

from purlin_core.communicator import Communicator
from purlin_core.errors import (
    AliasError,
    ArgumentTypeError,
    ClosedError,
    ConcurrentUseError,
    DeviceError,
    DtypeError,
    FileError,
    MismatchError,
    PeerError,
    PurlinError,
    SetupError,
    ShapeError,
    SpecError,
    StallError,
)
from purlin_core.plans import Stats
from purlin_core.spec import Spec
from purlin_core.trace import trace
from purlin_core.world import LocalWorld

__all__ = [
    "AliasError",
    "ArgumentTypeError",
    "ClosedError",
    "Communicator",
    "ConcurrentUseError",
    "DeviceError",
    "DtypeError",
    "FileError",
    "LocalWorld",
    "MismatchError",
    "PeerError",
    "PurlinError",
    "SetupError",
    "ShapeError",
    "Spec",
    "SpecError",
    "StallError",
    "Stats",
    "trace",
]
