"""What planning hands to the protocol: for each peer, which bytes of my tensors go there and where its bytes go in mine.

The *wire* is a line of bytes that both sides count alike. Item k of a route covers wire bytes [at, at + bytes); every item begins at a multiple of
16, so cuts at multiples of 16 never split an element. A route is a range of that line: [lo, lo + bytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

WIRE_ALIGN = 16
MAX_DIMS = 4  # strided dims of a box beside its contiguous run


class Kind(IntEnum):
    """What the reader does with what arrives. The numbers are those of csrc/purlin/moves.hpp."""

    COPY = 0
    REDUCE = 1  # every source's contribution to my part, in rank order
    ALL_REDUCE = 2  # REDUCE of my slice, then the slices are gathered


@dataclass(frozen=True)
class Box:
    """Bytes of one tensor: `extents` x `strides` (bytes, outermost first) around a contiguous `run`, from `offset` bytes after data_ptr().

    Wire byte i of the box is byte i % run of the run whose index, in row-major order over `extents`, is i // run.
    """

    offset: int
    run: int
    extents: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        count = self.run
        for extent in self.extents:
            count *= extent
        return count


@dataclass(frozen=True)
class Item:
    """One box of tensor number `tensor`; its bytes are wire bytes [at, at + box.bytes)."""

    tensor: int
    at: int
    box: Box


@dataclass(frozen=True)
class Route:
    """Wire bytes [lo, lo + bytes) of `items`; `payload` counts those that are not padding between items."""

    items: tuple[Item, ...] = ()
    lo: int = 0
    bytes: int = 0
    payload: int = 0


@dataclass(frozen=True)
class Moves:
    """One rank's part of a call. Routes are indexed by global rank; the entry of this rank itself is empty.

    COPY: send[d] -> receive[s] at the other side; own_from -> own_to locally.
    REDUCE: send[d] is my contribution to d's part; receive[s].bytes is my part's size (its items are unused); own_from is my contribution to my
    part and own_to its place in the output.
    ALL_REDUCE (joined): items are whole tensors; send[d] is d's slice of the input, receive[s] is s's slice of the output, own_from, own_to: mine.
    """

    kind: Kind
    rank: int
    ranks: int
    send: tuple[Route, ...]
    receive: tuple[Route, ...]
    own_from: Route
    own_to: Route
