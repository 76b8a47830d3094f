"""The files that a command is asked to write: each place is tried before any rank starts, and nothing is left there.

A folder that is not there is made with the first file in it: input that cannot be makes none. Whoever writes a file says so in a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from purlin_diffusion.commands.exits import InputError


def check_writable(name: str, file: Path) -> None:
    """Raises InputError when the argument `name` cannot be written to `file`."""
    from purlin_core.files import try_place

    try:
        try_place(file)
    except OSError as error:
        raise InputError(f"{name} {file} cannot be written: {error.strerror}") from error


def check_apart(files: Mapping[str, Path]) -> None:
    """Raises InputError when two arguments, by name, are one file, however it is spelled: the last would replace the others."""
    for (one, file), (other, same) in combinations(files.items(), 2):
        if file.resolve() == same.resolve() or (file.exists() and same.exists() and file.samefile(same)):
            raise InputError(f"{one} and {other} need a file each; {file} and {same} are one")


def in_folder(file: Path) -> Path:
    """`file`, its folder being there now."""
    from purlin_core import files

    return files.in_folder(file)
