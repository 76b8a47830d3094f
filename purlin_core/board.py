"""A page of notes a rank, readable by every rank even after the writer's death: its state, why it left, and the texts behind call signatures.

Only 24 bits of a call's identity travel with its messages; when two ranks disagree, the names come from here.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from purlin_core.memory import Segment

_ENTRIES, _ENTRY_BYTES, _TEXT_AT, _REASON_AT = 512, 512, 4096, 64
BOARD_BYTES = _TEXT_AT + _ENTRIES * _ENTRY_BYTES
_HEAD = struct.Struct("<II")  # signature, bytes of text


class State(IntEnum):
    OPEN = 0
    CLOSED = 1
    ABORTED = 2  # by this rank, and for good


class Board:
    """One rank's page. Written by that rank, read by all."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._at = segment.mapping

    @property
    def state(self) -> State:
        return State(self._at[0])

    @state.setter
    def state(self, state: State) -> None:
        self._at[0] = int(state)

    @property
    def reason(self) -> str:
        return self._read(_REASON_AT)[1]

    @reason.setter
    def reason(self, text: str) -> None:
        self._write(_REASON_AT, 0, text, _TEXT_AT - _REASON_AT)

    def note(self, signature: int, text: str) -> None:
        """Remember what a signature stands for; a later one with the same low bits replaces it."""
        self._write(_TEXT_AT + signature % _ENTRIES * _ENTRY_BYTES, signature, text, _ENTRY_BYTES)

    def text(self, signature: int) -> str | None:
        """The call behind a signature, or None when it was never noted or has been replaced."""
        found, text = self._read(_TEXT_AT + signature % _ENTRIES * _ENTRY_BYTES)
        return text if found == signature and text else None

    def _write(self, at: int, signature: int, text: str, room: int) -> None:
        encoded = text.encode()[: room - _HEAD.size]
        self._at[at + _HEAD.size : at + _HEAD.size + len(encoded)] = encoded
        self._at[at : at + _HEAD.size] = _HEAD.pack(signature, len(encoded))

    def _read(self, at: int) -> tuple[int, str]:
        signature, size = _HEAD.unpack(self._at[at : at + _HEAD.size])
        start = at + _HEAD.size
        return signature, self._at[start : start + size].decode(errors="replace")
