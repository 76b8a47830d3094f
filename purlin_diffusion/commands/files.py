"""The files that a command is asked to write: each place is tried before any rank starts, and nothing is left there.

A folder that is not there is made with the first file in it: input that cannot be makes none. Whoever writes a file says so in a line.
"""

from __future__ import annotations

from pathlib import Path

from purlin_diffusion.commands.exits import InputError


def check_writable(name: str, file: Path) -> None:
    """Raises InputError when the argument `name` cannot be written to `file`."""
    from purlin_core.files import try_place

    try:
        try_place(file)
    except OSError as error:
        raise InputError(f"{name} {file} cannot be written: {error.strerror}") from error


def in_folder(file: Path) -> Path:
    """`file`, its folder being there now."""
    from purlin_core import files

    return files.in_folder(file)
