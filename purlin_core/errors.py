"""Every error the core raises by name. The message says the call, the argument, what was needed, what came, and the cure."""

from __future__ import annotations


class PurlinError(Exception):
    """Base of all named errors."""


class SpecError(PurlinError, ValueError):
    """A spec string that does not parse or means nothing."""


class ShapeError(PurlinError, ValueError):
    """Shapes, sizes or strides that do not fit the spec."""


class ArgumentTypeError(PurlinError, TypeError):
    """An argument of a Python type that means nothing here."""


class DtypeError(PurlinError, TypeError):
    """A dtype this operation cannot take."""


class DeviceError(PurlinError, ValueError):
    """A tensor on another device than the communicator's, or a device that cannot be used."""


class AliasError(PurlinError, ValueError):
    """Input and output share storage in a form that is not one of the three allowed."""


class FileError(PurlinError, OSError):
    """A file that cannot be written."""


# Raised before anything is sent: where all ranks raise one alike, the next call works.
INPUT_ERRORS = (SpecError, ShapeError, ArgumentTypeError, DtypeError, DeviceError, AliasError)


class ClosedError(PurlinError, RuntimeError):
    """The communicator was closed."""


class MismatchError(PurlinError, RuntimeError):
    """Ranks called different collectives; names both calls. The communicator is dead, a new one works."""


class StallError(PurlinError, RuntimeError):
    """A peer did not come before the deadline. The communicator is dead, a new one works."""


class PeerError(PurlinError, RuntimeError):
    """A peer died or left with an exception. The communicator is dead, a new one works."""


class ConcurrentUseError(PurlinError, RuntimeError):
    """Two calls on one communicator at the same time."""


class SetupError(PurlinError, RuntimeError):
    """Ranks that cannot form a communicator, and why."""


def in_words(error: BaseException) -> str:
    """Its type, and the first line of its text where it has one that can be said."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:
        text = ""
    said = text.encode(errors="backslashreplace").decode()
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
