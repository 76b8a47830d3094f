"""The files that a command is asked to write: each place is tried before any rank starts, and nothing is left there.

A folder that is not there is made with the first file in it: input that cannot be makes none. Whoever writes a file says so in a line.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from purlin_diffusion.commands.exits import InputError


def check_writable(name: str, file: Path) -> None:
    """Raises InputError when the argument `name` cannot be written to `file`."""
    try:
        if _is_there(file):
            with file.open("ab"):
                return
        folder = next(parent for parent in file.parents if _is_there(parent))
        if folder == file.parent:
            with tempfile.TemporaryFile(dir=folder):
                return
        with tempfile.TemporaryDirectory(dir=folder):
            return
    except OSError as error:
        raise InputError(f"{name} {file} cannot be written: {error.strerror}") from error


def _is_there(path: Path) -> bool:
    """Raises OSError for a path that cannot be; exists() hides that on newer Pythons."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def in_folder(file: Path) -> Path:
    """`file`, its folder being there now."""
    file.parent.mkdir(parents=True, exist_ok=True)
    return file
