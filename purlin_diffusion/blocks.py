"""Which boxes of which tensors go from rank to rank, for a carrier that packs them into messages. Pure functions of specs, shapes and sizes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from purlin_core.spec import Dim, Layout, Lengths, Sizes, Spec
from purlin_diffusion.errors import NotBuiltError

ALIGN = 16  # a block begins where any dtype may be viewed


@dataclass(frozen=True)
class Block:
    """A box of one tensor: (start, length) of each dim, at its source (left order of dims) and at its reader (right order)."""

    tensor: int
    source: tuple[tuple[int, int], ...]
    reader: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    bytes: int

    @property
    def padded(self) -> int:
        return -(-self.bytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class Packing:
    """One rank's part of an exchange. sends[r] and receives[r] are what goes to and comes from rank r; `own` stays here."""

    out_shapes: tuple[tuple[int, ...], ...]
    own: tuple[Block, ...]
    sends: tuple[tuple[Block, ...], ...]
    receives: tuple[tuple[Block, ...], ...]
    alike: int | None  # every rank sends the same to all others, and no message is longer than this many bytes

    @property
    def sent_bytes(self) -> int:
        return sum(block.bytes for blocks in self.sends for block in blocks)

    @property
    def received_bytes(self) -> int:
        return sum(block.bytes for blocks in self.receives for block in blocks)


def packing(specs: Sequence[Spec], tensors: Sequence[Tensor], sizes: Sizes | None, *, rank: int, ranks: int) -> Packing:
    """How `tensors` move. A partial spec's input is taken as reduced already. Raises ShapeError, NotBuiltError."""
    lengths = [_lengths(x, spec, sizes, rank, ranks) for x, spec in zip(tensors, specs, strict=True)]
    item_bytes = [x.element_size() for x in tensors]

    def route(source: int, reader: int) -> tuple[Block, ...]:
        known = zip(specs, lengths, item_bytes, strict=True)
        return tuple(
            block
            for i, (spec, length, size) in enumerate(known)
            for block in _blocks(i, spec, length, size, source, reader)
        )

    others = [[r for r in range(ranks) if r != s] for s in range(ranks)]
    alike = all(spec.right.sharded_dim is None for spec in specs) and ranks > 1
    return Packing(
        out_shapes=tuple(_shape(spec.right, length, rank) for spec, length in zip(specs, lengths, strict=True)),
        own=route(rank, rank),
        sends=tuple(() if r == rank else route(rank, r) for r in range(ranks)),
        receives=tuple(() if r == rank else route(r, rank) for r in range(ranks)),
        alike=max(wire_bytes(route(s, others[s][0])) for s in range(ranks)) if alike else None,
    )


def wire_bytes(blocks: Sequence[Block]) -> int:
    return sum(block.padded for block in blocks)


def pack(blocks: Sequence[Block], tensors: Sequence[Tensor], size: int) -> Tensor:
    """A message of `size` bytes that begins with `blocks`."""
    message = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
    at = 0
    for block in blocks:
        piece = window(tensors[block.tensor], block.source).permute(block.order)
        message[at : at + block.bytes].view(piece.dtype).view(piece.shape).copy_(piece)
        at += block.padded
    return message


def unpack(blocks: Sequence[Block], message: Tensor, outputs: Sequence[Tensor]) -> None:
    """Put the blocks at the beginning of `message` in their places."""
    at = 0
    for block in blocks:
        place = window(outputs[block.tensor], block.reader)
        place.copy_(message[at : at + block.bytes].view(place.dtype).view(place.shape))
        at += block.padded


def window(x: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
    for dim, (start, length) in enumerate(places):
        x = x.narrow(dim, start, length)
    return x


def _lengths(x: Tensor, spec: Spec, sizes: Sizes | None, rank: int, ranks: int) -> Lengths:
    if any(segment.halo for segment in spec.right.segments.values()):
        raise NotBuiltError(f'exchange "{spec}": backend "torch" moves no halos. Use backend "purlin".')
    known = {name: size for name, size in (sizes or {}).items() if name in spec.left.segments}
    return spec.lengths(x.shape, rank=rank, ranks=ranks, sizes=known, call="exchange")


def _blocks(tensor: int, spec: Spec, lengths: Lengths, item_bytes: int, source: int, reader: int) -> list[Block]:
    """Of sharded segments, where what one has and the other wants overlap; of others each rank reads its own copy."""
    blocks = []
    for chosen in itertools.product(*(_overlaps(dim, spec, lengths, source, reader) for dim in spec.left.dims)):
        travels = any(spec.left.segments[name].sharded for name, _, _ in chosen)
        if source == reader or travels:
            ranges = {name: (low, high) for name, low, high in chosen}
            there = tuple(_place(dim, ranges, spec.right, lengths, reader) for dim in spec.right.dims)
            here = tuple(_place(dim, ranges, spec.left, lengths, source) for dim in spec.left.dims)
            blocks.append(Block(tensor, here, there, spec.order, item_bytes * prod(length for _, length in there)))
    return blocks


def _overlaps(dim: Dim, spec: Spec, lengths: Lengths, source: int, reader: int) -> list[tuple[str, int, int]]:
    found = []
    for name in dim.names:
        has, wants = _range(spec.left, name, lengths, source), _range(spec.right, name, lengths, reader)
        low, high = max(has[0], wants[0]), min(has[1], wants[1])
        if low < high:
            found.append((name, low, high))
    return found


def _range(side: Layout, name: str, lengths: Lengths, rank: int) -> tuple[int, int]:
    if not side.segments[name].sharded:
        return 0, lengths.whole[name]
    first = sum(lengths.shards[name][:rank])
    return first, first + lengths.shards[name][rank]


def _place(
    dim: Dim, ranges: Mapping[str, tuple[int, int]], side: Layout, lengths: Lengths, rank: int
) -> tuple[int, int]:
    start = 0
    for name in dim.names:
        low, high = _range(side, name, lengths, rank)
        if name in ranges:
            return start + ranges[name][0] - low, ranges[name][1] - ranges[name][0]
        start += high - low
    raise AssertionError("a dim of which no segment was chosen")


def _shape(side: Layout, lengths: Lengths, rank: int) -> tuple[int, ...]:
    return tuple(
        sum(high - low for low, high in (_range(side, name, lengths, rank) for name in dim.names)) for dim in side.dims
    )
