"""A page of notes a rank, which every rank can read even after the writer's death: its state, why it left, why it refused a call, and the texts
behind call signatures.

Only 24 bits of a call's identity travel with its messages; when two ranks disagree, the names come from here.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from purlin_core.memory import Segment

_ENTRIES, _ENTRY_BYTES = 512, 512
_REASON_AT, _REFUSED_AT, _TEXT_AT = 64, 2048, 4096
BOARD_BYTES = _TEXT_AT + _ENTRIES * _ENTRY_BYTES
_HEAD = struct.Struct("<II")  # what the text is about, and its bytes


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
        self._write(_REASON_AT, 0, text, _REFUSED_AT - _REASON_AT)

    def refuse(self, entered: int, why: str) -> None:
        """A call was refused, and nothing sent, when the call entered last was number `entered`."""
        self._write(_REFUSED_AT, entered % (1 << 32), why, _TEXT_AT - _REFUSED_AT)

    def refused(self, entered: int) -> str:
        """Why a call was refused since call number `entered`, or nothing."""
        found, why = self._read(_REFUSED_AT)
        return why if found == entered % (1 << 32) else ""

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
        return signature, self._at[start : start + size].decode(errors="ignore")
