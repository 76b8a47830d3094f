"""Tensors in memory of their own, with poison around them; and moves, run over their raw bytes in plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from purlin_core.moves import WIRE_ALIGN, Box, Kind, Moves, Route
from purlin_core.reference import reduce
from purlin_core.spec import Op

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Placed:
    """A view into an arena; every other byte of the arena must stay as it is."""

    arena: Bytes
    view: Tensor

    @staticmethod
    def of(view: Tensor) -> Placed:
        arena = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
        return Placed(arena.numpy(), view)

    @staticmethod
    def anywhere(shape: Sequence[int], dtype: torch.dtype, random: Random) -> Placed:
        """Dims in any order in memory, gaps between rows, a step between elements, an odd start."""
        order = random.sample(range(len(shape)), len(shape))
        gaps = [random.choice([0, 0, 0, 1, 2]) for _ in shape]
        stride, strides = random.choice([1, 1, 1, 2]), [0] * len(shape)
        for i in order:
            strides[i] = stride
            stride *= max(shape[i], 1) + gaps[i]
        start = random.choice([0, 1, 2, 5])
        arena = torch.tensor(list(random.randbytes((stride + start + 1) * dtype.itemsize)), dtype=torch.uint8)
        return Placed.of(arena.view(dtype).as_strided(tuple(shape), strides, start))

    @property
    def first(self) -> int:
        return int(self.view.storage_offset() * self.view.element_size())

    def write(self, values: Tensor) -> None:
        self.view.copy_(values)

    def holds(self, values: Tensor) -> bool:
        def raw(x: Tensor) -> list[int]:
            return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()

        return self.view.shape == values.shape and raw(self.view) == raw(values)

    def surroundings(self) -> Bytes:
        """The arena with the view blanked out."""
        shape, strides, size = self.view.shape, self.view.stride(), self.view.element_size()
        mine = places(Box(self.first, size, tuple(shape), tuple(stride * size for stride in strides)))
        rest: Bytes = self.arena.copy()
        rest[mine] = 0
        return rest


def places(box: Box) -> npt.NDArray[np.int64]:
    """Where the bytes of a box lie, in wire order."""
    at = np.array([box.offset], np.int64)
    for extent, stride in zip(box.extents, box.strides, strict=True):
        at = (at[:, None] + np.arange(extent) * stride).reshape(-1)
    return (at[:, None] + np.arange(box.run)).reshape(-1)


PADDING = 0xEE


def pack(route: Route, tensors: Sequence[Placed]) -> Bytes:
    end = max([route.lo + route.bytes, *(item.at + item.box.bytes for item in route.items)])
    wire = np.full(end, PADDING, np.uint8)
    for item in route.items:
        placed = tensors[item.tensor]
        wire[item.at : item.at + item.box.bytes] = placed.arena[places(item.box) + placed.first]
    return wire[route.lo : route.lo + route.bytes]


def unpack(route: Route, wire: Bytes, tensors: Sequence[Placed]) -> None:
    for item in route.items:
        placed = tensors[item.tensor]
        lo, hi = max(item.at, route.lo), min(item.at + item.box.bytes, route.lo + route.bytes)
        if lo < hi:
            at = places(item.box)[lo - item.at : hi - item.at] + placed.first
            placed.arena[at] = wire[lo - route.lo : hi - route.lo]


def reduced(contributions: Sequence[Bytes], dtype: torch.dtype, op: Op) -> Bytes:
    """Contributions of all ranks, whole lines of 16 bytes at a time: the padding between items is reduced, too."""
    size = len(contributions[0])
    padded = [torch.from_numpy(np.pad(wire, (0, WIRE_ALIGN - size % WIRE_ALIGN))).view(dtype) for wire in contributions]
    result: Bytes = reduce(padded, op).view(torch.uint8).numpy()[:size]
    return result


@dataclass(frozen=True)
class World:
    """All ranks of a call: their moves and their tensors."""

    moves: Sequence[Moves]
    inputs: Sequence[Sequence[Placed]]  # [ranks][tensors]
    outputs: Sequence[Sequence[Placed]]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(permutations(range(len(self.moves)), 2))

    def run(self, op: Op = "sum") -> None:
        kind = self.moves[0].kind
        if kind is Kind.COPY:
            for source, reader in self.pairs:
                self.copy(source, reader)
            for rank in range(len(self.moves)):
                self.copy_own(rank)
            return
        sums = [self.reduced_at(rank, op) for rank in range(len(self.moves))]
        for rank, moves in enumerate(self.moves):
            unpack(moves.own_to, sums[rank], self.outputs[rank])
            for source in range(len(self.moves)):
                if kind is Kind.ALL_REDUCE and source != rank:
                    unpack(moves.receive[source], sums[source], self.outputs[rank])

    def copy(self, source: int, reader: int) -> None:
        wire = pack(self.moves[source].send[reader], self.inputs[source])
        unpack(self.moves[reader].receive[source], wire, self.outputs[reader])

    def copy_own(self, rank: int) -> None:
        unpack(self.moves[rank].own_to, pack(self.moves[rank].own_from, self.inputs[rank]), self.outputs[rank])

    def reduced_at(self, rank: int, op: Op) -> Bytes:
        routes = [moves.own_from if r == rank else moves.send[rank] for r, moves in enumerate(self.moves)]
        contributions = [pack(route, self.inputs[r]) for r, route in enumerate(routes)]
        return reduced(contributions, self.inputs[rank][0].view.dtype, op)


def wire_of(route: Route) -> tuple[int, int, int]:
    return route.lo, route.bytes, route.payload
