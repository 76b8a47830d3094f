"""Whether a file can be written, told before the work whose results it is to hold. Nothing is left there; its folder is made with the file."""

from __future__ import annotations

import tempfile
from pathlib import Path


def try_place(file: Path) -> None:
    """Raises OSError where `file` cannot be."""
    if _is_there(file):
        with file.open("ab"):
            return
    folder = next(parent for parent in file.parents if _is_there(parent))
    if folder == file.parent:
        with tempfile.TemporaryFile(dir=folder):
            return
    with tempfile.TemporaryDirectory(dir=folder):
        return


def in_folder(file: Path) -> Path:
    """`file`, its folder being there now."""
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _is_there(path: Path) -> bool:
    """Raises OSError for a path that cannot be; exists() hides that on newer Pythons."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True
