"""Whether a file can be written, told before the work whose results it is to hold. Nothing is left there; its folder is made with the file."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path


def try_place(file: Path) -> None:
    """Raises OSError where `file`, or what it links to, cannot be, or is no regular file."""
    if _is_there(file):
        if not file.is_file() and not file.is_dir():  # to open a pipe is to wait for its reader
            raise OSError(errno.EINVAL, "Not a regular file", str(file))
        with file.open("ab"):
            return
    file = file.resolve()  # a link to what is not there yet
    folder = next(parent for parent in file.parents if _is_there(parent))
    if folder == file.parent:
        with tempfile.TemporaryFile(dir=folder):
            return
    with tempfile.TemporaryDirectory(dir=folder):
        return


def in_folder(file: Path) -> Path:
    """`file`, its folder being there now, and that of what it links to."""
    for place in (file.resolve(), file):  # in this order: a folder may be the link
        place.parent.mkdir(parents=True, exist_ok=True)
    return file


def _is_there(path: Path) -> bool:
    """Raises OSError for a path that cannot be; exists() hides that on newer Pythons."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True
