"""Words for a stream that may take none: its reader is gone, its disk is full. They are lost then, and nothing else is."""

from __future__ import annotations

import os
from typing import TextIO


def say(text: str, stream: TextIO) -> str:
    """Why `stream` did not take `text` and the end of its line; empty where it did."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        to_nowhere(stream)
        return error.strerror or str(error)
    return ""


def to_nowhere(stream: TextIO) -> None:
    """What is left in it, too: Python would try to write that as it ends, and fail once more."""
    try:
        descriptor = stream.fileno()
    except OSError:  # a stream in memory
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
