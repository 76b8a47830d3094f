"""Which tensors of a call may share memory: three forms, told apart byte by byte from everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor

from purlin_core.errors import AliasError
from purlin_core.moves import Item, Moves
from purlin_core.spec import Spec


@dataclass(frozen=True)
class Memory:
    """Where a tensor lies: `address` of its first element (bytes), strides in elements, `itemsize` in bytes."""

    name: str  # for texts
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @staticmethod
    def of(name: str, x: Tensor) -> Memory:
        return Memory(name, x.data_ptr(), tuple(x.shape), x.stride(), x.element_size())

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    @cached_property
    def end(self) -> int:
        """Address after the last byte; `address` for a tensor without elements."""
        if not self.nbytes:
            return self.address
        steps = zip(self.shape, self.strides, strict=True)
        return self.address + (1 + sum((extent - 1) * stride for extent, stride in steps)) * self.itemsize


def check_alias(
    moves: Moves,
    inputs: Sequence[Memory],
    outputs: Sequence[Memory],
    *,
    specs: Sequence[Spec] = (),
    call: str = "redistribute",
) -> None:
    """Raise AliasError, naming both tensors, when an output shares bytes with an input or with another output.

    Three forms are allowed, tensor by tensor: an all-gather whose input is its own shard of the output, a
    reduce-scatter whose output is its own shard of the input, an all-reduce onto itself. There own_from and own_to name
    the same bytes, and the side that runs the moves (csrc) leaves the own copy out because the addresses are equal.
    In an all-reduce the peers still read what own_to overwrites: that side also writes a chunk of the output only after
    it has staged that chunk for every peer.
    `specs`: one a tensor; none where no form is allowed. Interleaved views are told apart byte by byte; two tensors
    whose strides do not nest in each other count as sharing.
    """
    for i, output in enumerate(outputs):
        for j, other in enumerate([*inputs, *outputs[:i]]):
            if not _share(output, other):
                continue
            if i == j and specs and _in_place(moves, i, specs[i], inputs[i], output):
                continue
            lo, hi = max(output.address, other.address), min(output.end, other.end)
            subject = f'{call} "{specs[i]}"' if specs else call
            came = f"bytes in [{lo:#x}, {hi:#x}) that it shares with `{other.name}`"
            cure = (
                "Pass another tensor or none; in place are an all-gather from its own shard of the output, "
                "a reduce-scatter into its own shard of the input, and an all-reduce onto itself."
            )
            raise AliasError(f"{subject}: `{output.name}` needs memory of its own; got {came}. {cure}")


def _in_place(moves: Moves, number: int, spec: Spec, x: Memory, out: Memory) -> bool:
    own_from = [item for item in moves.own_from.items if item.tensor == number]
    own_to = [item for item in moves.own_to.items if item.tensor == number]
    if [_place(item, x) for item in own_from] != [_place(item, out) for item in own_to]:
        return False
    if spec.kind_name == "all_gather":
        return sum(item.box.bytes for item in own_from) == x.nbytes  # no other part of x lies under what peers write
    if spec.kind_name == "reduce_scatter":
        scattered = next(dim for dim in spec.right.dims if dim.sharded)
        return all(segment.sharded for segment in scattered.segments)  # what all ranks get, they still read from x
    return spec.kind_name == "all_reduce"


def _place(item: Item, memory: Memory) -> tuple[object, ...]:
    return memory.address + item.box.offset, item.box.run, item.box.extents, item.box.strides


def _share(a: Memory, b: Memory) -> bool:
    """Is there a byte that both hold?"""
    if not a.nbytes or not b.nbytes or a.end <= b.address or b.end <= a.address:
        return False
    # A byte of `a` is one of `b` where the strides, each taken up in `a` and down in `b`, lead from a to b.
    steps: dict[int, tuple[int, int]] = {1: (1 - b.itemsize, a.itemsize - 1)}
    for memory, up, down in ((a, 1, 0), (b, 0, 1)):
        for extent, stride in zip(memory.shape, memory.strides, strict=True):
            low, high = steps.get(stride * memory.itemsize, (0, 0))
            steps[stride * memory.itemsize] = (low - down * (extent - 1), high + up * (extent - 1))
    steps.pop(0, None)
    return _leads(b.address - a.address, [(stride, *steps[stride]) for stride in sorted(steps, reverse=True)])


def _leads(distance: int, steps: Sequence[tuple[int, int, int]]) -> bool:
    """Can `distance` be made of steps (stride, fewest, most), longest first? Says yes where strides do not nest."""
    if not steps:
        return distance == 0
    (stride, fewest, most), rest = steps[0], steps[1:]
    down, up = sum(step * low for step, low, _ in rest), sum(step * high for step, _, high in rest)
    first, last = max(fewest, -((up - distance) // stride)), min(most, (distance - down) // stride)
    return last - first > 3 or any(_leads(distance - n * stride, rest) for n in range(first, last + 1))
