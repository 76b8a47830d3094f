"""Planning: from specs, shapes and strides to moves, the boxes of bytes that each pair of ranks exchanges.

Pure functions; the caller caches. Wire order is row-major over the dims of the left side, segment by segment, at both
ends of a pair, however source and reader lay out their memory: so each coalesces its own boxes, and both count alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise, permutations, product
from math import prod
from operator import mul
from typing import NamedTuple, TypeAlias

from purlin_core.errors import AliasError, DtypeError, ShapeError, SpecError
from purlin_core.moves import MAX_DIMS, WIRE_ALIGN, Box, Item, Kind, Moves, Route
from purlin_core.spec import Dim, Layout, Lengths, Sizes, Spec, check_sizes

FrozenSizes: TypeAlias = tuple[tuple[str, int | tuple[int, ...]], ...]


class AllReduce(Enum):
    """How an all-reduce runs."""

    ONE_SHOT = "one-shot"  # everyone sends the whole tensor to everyone: fewest steps
    JOINED = "joined"  # reduce-scatter of slices of the wire, then their all-gather: fewest bytes


@dataclass(frozen=True)
class Operand:
    """One tensor of a call as one rank sees it. `dtype` is any name; only equality counts, and only in reductions."""

    spec: Spec
    shape: tuple[int, ...]  # of the input on this rank
    strides: tuple[int, ...]  # of the input, in elements
    out_strides: tuple[int, ...]  # of the output on this rank, in elements; its shape is output_shape()
    itemsize: int  # bytes
    dtype: str = ""
    sizes: FrozenSizes = ()

    def lengths(self, *, rank: int, ranks: int, call: str = "redistribute", argument: str = "x") -> Lengths:
        sizes = dict(self.sizes)
        return self.spec.lengths(self.shape, rank=rank, ranks=ranks, sizes=sizes, call=call, argument=argument)


def freeze_sizes(sizes: Sizes | None) -> FrozenSizes:
    """`sizes` as an Operand holds them: hashable, in the order of the names."""
    return tuple((name, size if isinstance(size, int) else tuple(size)) for name, size in sorted((sizes or {}).items()))


def output_shape(
    spec: Spec,
    shape: Sequence[int],
    rank: int,
    ranks: int,
    sizes: Sizes | None = None,
    *,
    call: str = "redistribute",
    argument: str = "x",
) -> tuple[int, ...]:
    """Shape of the output on `rank` for an input of local `shape`. Raises ShapeError."""
    lengths = spec.lengths(shape, rank=rank, ranks=ranks, sizes=sizes, call=call, argument=argument)
    return local_shape(spec.right, holdings_of(spec.right, lengths, rank))


def plan_moves(
    tensors: Sequence[Operand],
    rank: int,
    ranks: int,
    *,
    all_reduce: AllReduce = AllReduce.ONE_SHOT,
    call: str = "redistribute",
) -> Moves:
    """The moves of `rank` in a call on `tensors`: all copies, or all the same reduction of one dtype.

    In the in-place forms (see check_alias) own_from and own_to name the same bytes. They are planned all the same:
    whoever runs the moves compares the two addresses and leaves the own copy out when they are equal.
    Raises ShapeError, SpecError, DtypeError, and AliasError for an output whose elements share memory.
    """
    kind = _kind(tensors, all_reduce, call)
    sizes = {name: size for tensor in tensors for name, size in tensor.sizes}
    check_sizes([tensor.spec for tensor in tensors], sizes, call=call)
    geometries = [_Geometry.of(tensor, i, len(tensors), rank, ranks, call) for i, tensor in enumerate(tensors)]
    own_from, own_to = _source_route(geometries, rank, rank), _target_route(geometries, rank, rank)
    if kind is Kind.ALL_REDUCE:
        return _joined(own_from, own_to, rank, ranks)
    peers = [peer for peer in range(ranks) if peer != rank]
    send = {peer: _source_route(geometries, rank, peer) for peer in peers}
    if kind is Kind.REDUCE:
        receive = {peer: Route((), 0, own_to.bytes, own_to.payload) for peer in peers}
    else:
        receive = {peer: _target_route(geometries, peer, rank) for peer in peers}
    return _moves(kind, rank, ranks, send, receive, own_from, own_to)


def all_to_all_moves(
    shape: Sequence[int],
    strides: Sequence[int],
    *,
    out_shape: Sequence[int],
    out_strides: Sequence[int],
    itemsize: int,
    rank: int,
    ranks: int,
    in_sizes: Sequence[int] | None = None,
    out_sizes: Sequence[int] | None = None,
    call: str = "all_to_all_single",
) -> Moves:
    """The moves of torch's all_to_all_single: in_sizes[d] rows of dim 0 go to rank d, out_sizes[s] rows come from s.

    A rank knows its row and its column of the matrix only; that the others agree shows when the call runs.
    Strides in elements. None: equal shares. Raises ShapeError, and AliasError for an output that overlaps itself.
    """
    if len(shape) == 0 or len(shape) != len(out_shape) or tuple(shape[1:]) != tuple(out_shape[1:]):
        came = f"{tuple(shape)} and {tuple(out_shape)}"
        cure = "Reshape one of them; a scalar has no rows."
        raise ShapeError(f"{call}: `x` and `out` need shapes that differ in dim 0 only; got {came}. {cure}")
    _check_distinct(out_shape, out_strides, call, "out")
    give = _shares(shape[0], in_sizes, ranks, f"{call}: `in_sizes`", "x")
    take = _shares(out_shape[0], out_sizes, ranks, f"{call}: `out_sizes`", "out")
    if give[rank] != take[rank]:
        came = f"in_sizes[{rank}] = {give[rank]}, out_sizes[{rank}] = {take[rank]}"
        raise ShapeError(f"{call}: rank {rank} needs to give itself what it takes; got {came}. Make them equal.")
    first_given, first_taken = [0, *accumulate(give)], [0, *accumulate(take)]

    def part(count: int, first: int, strides: Sequence[int], argument: str) -> Route:
        extents = (count, *shape[1:])
        if 0 in extents:
            return Route()
        box = _box(extents, (first, *[0] * (len(shape) - 1)), strides, itemsize)
        return _route([(0, _checked(box, call, argument))])

    send = {peer: part(give[peer], first_given[peer], strides, "x") for peer in range(ranks)}
    receive = {peer: part(take[peer], first_taken[peer], out_strides, "out") for peer in range(ranks)}
    return _moves(Kind.COPY, rank, ranks, send, receive, send[rank], receive[rank])


def largest_message(tensors: Sequence[Operand], rank: int, ranks: int, *, call: str = "redistribute") -> int:
    """The most bytes of wire that any rank sends to any other, padding included: the same number on every rank."""
    geometries = [_Geometry.of(tensor, i, len(tensors), rank, ranks, call) for i, tensor in enumerate(tensors)]
    pairs = permutations(range(ranks), 2)
    return max((_wire_bytes(geometries, source, target) for source, target in pairs), default=0)


def _wire_bytes(geometries: Sequence[_Geometry], source: int, target: int) -> int:
    """As _route() strings boxes on a wire."""
    end = 0
    for size in (size for g in geometries for size in g.sizes(source, target)):
        end = _next_place(end) + size
    return end


def seen_by(operand: Operand, rank: int, ranks: int, peer: int) -> Operand:
    """The operand that `peer` brings to the call when `rank` brings this one; its tensors contiguous."""
    lengths = operand.lengths(rank=rank, ranks=ranks)
    shape, out_shape = (
        local_shape(side, holdings_of(side, lengths, peer)) for side in (operand.spec.left, operand.spec.right)
    )
    return replace(operand, shape=shape, strides=contiguous(shape), out_strides=contiguous(out_shape))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of `shape`, as torch has them: an extent of 0 counts as 1."""
    return tuple(accumulate((max(n, 1) for n in reversed(shape[1:])), mul, initial=1))[::-1] if shape else ()


def cut_wire(wire_bytes: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """(lo, bytes) of each rank's slice of a wire: cut at multiples of 16, as evenly as that allows, in rank order."""
    lines, longer = divmod(-(-wire_bytes // WIRE_ALIGN), ranks)
    cuts = [min(wire_bytes, WIRE_ALIGN * (rank * lines + min(rank, longer))) for rank in range(ranks + 1)]
    return tuple((lo, hi - lo) for lo, hi in pairwise(cuts))


def sent_bytes(moves: Moves) -> int:
    """Bytes this rank puts on the wire, padding not counted."""
    gathered = (moves.ranks - 1) * moves.own_to.payload if moves.kind is Kind.ALL_REDUCE else 0
    return gathered + sum(route.payload for route in moves.send)


def received_bytes(moves: Moves) -> int:
    """Bytes that reach this rank over the wire, padding not counted."""
    reduced = (moves.ranks - 1) * moves.own_from.payload if moves.kind is Kind.ALL_REDUCE else 0
    return reduced + sum(route.payload for route in moves.receive)


# What a rank holds


class _Holding(NamedTuple):
    """Rows [lo, hi) of a name, counted over all ranks, that lie from `row` on in a rank's local dim."""

    lo: int
    hi: int
    row: int


_Holdings: TypeAlias = Mapping[str, _Holding]


def holdings_of(layout: Layout, lengths: Lengths, rank: int) -> _Holdings:
    """What `rank` holds of every name on the side `layout`, halos included."""
    holdings = {}
    for dim in layout.dims:
        row = 0
        for segment in dim.segments:
            lo, hi = 0, lengths.whole[segment.name]
            if segment.sharded:
                shards, whole = lengths.shards[segment.name], hi
                lo = sum(shards[:rank])
                hi = lo + shards[rank]
                if lo < hi:  # a rank without rows gets no halo either
                    lo, hi = max(0, lo - segment.before), min(whole, hi + segment.after)
            holdings[segment.name] = _Holding(lo, hi, row)
            row += hi - lo
    return holdings


def local_shape(layout: Layout, holdings: _Holdings) -> tuple[int, ...]:
    return tuple(sum(holdings[name].hi - holdings[name].lo for name in dim.names) for dim in layout.dims)


# What two ranks share


class _Strip(NamedTuple):
    """Rows of one dim, and where they begin in the source's local dim and in the target's."""

    rows: int
    source: int
    target: int


_Block: TypeAlias = tuple[_Strip, ...]  # a strip of every left dim


def _strips(dim: Dim, source: _Holdings, target: _Holdings, *, wired: bool) -> list[_Strip]:
    """Rows of a left dim that go from source to target, segment by segment; what touches at both ends is one strip.

    `wired`: on the wire, in the sharded dim, where a name that is not sharded stays at home: everyone has a copy.
    """
    strips: list[_Strip] = []
    for segment in dim.segments:
        here, there = source[segment.name], target[segment.name]
        lo, hi = max(here.lo, there.lo), min(here.hi, there.hi)
        if lo >= hi or (wired and not segment.sharded):
            continue
        strip = _Strip(hi - lo, here.row + lo - here.lo, there.row + lo - there.lo)
        last = strips[-1] if strips else None
        if last and (last.source + last.rows, last.target + last.rows) == (strip.source, strip.target):
            strips[-1] = _Strip(last.rows + strip.rows, last.source, last.target)
        else:
            strips.append(strip)
    return strips


@dataclass(frozen=True)
class _Geometry:
    """One tensor of the call: who holds what of it, and how this rank's two tensors lie. Strides in left order."""

    number: int
    operand: Operand
    passed: tuple[_Holdings, ...]  # [ranks]
    wanted: tuple[_Holdings, ...]  # [ranks]
    out_strides: tuple[int, ...]
    call: str
    arguments: tuple[str, str]  # how errors call the input and the output

    @staticmethod
    def of(operand: Operand, number: int, count: int, rank: int, ranks: int, call: str) -> _Geometry:
        spec = operand.spec
        arguments = (f"tensors[{number}]", f"out[{number}]") if count > 1 else ("x", "out")
        lengths = operand.lengths(rank=rank, ranks=ranks, call=call, argument=arguments[0])
        passed = tuple(holdings_of(spec.left, lengths, peer) for peer in range(ranks))
        wanted = tuple(holdings_of(spec.right, lengths, peer) for peer in range(ranks))
        _check_distinct(local_shape(spec.right, wanted[rank]), operand.out_strides, f'{call} "{spec}"', arguments[1])
        by_left_dim = dict(zip(spec.order, operand.out_strides, strict=True))
        out_strides = tuple(by_left_dim[i] for i in range(len(spec.order)))
        return _Geometry(number, operand, passed, wanted, out_strides, call, arguments)

    def blocks(self, source: int, target: int) -> Iterator[_Block]:
        """What goes from source to target, in wire order."""
        spec = self.operand.spec
        crosses = source != target and not spec.partial
        if crosses and spec.left.sharded_dim is None:
            return iter(())
        here, there = self.passed[source], self.wanted[target]
        return product(*(_strips(dim, here, there, wired=crosses and dim.sharded) for dim in spec.left.dims))

    def sizes(self, source: int, target: int) -> Iterator[int]:
        """Bytes of each of blocks()."""
        for block in self.blocks(source, target):
            yield self.operand.itemsize * prod(strip.rows for strip in block)

    def source_box(self, block: _Block) -> Box:
        return self._box(block, [strip.source for strip in block], self.operand.strides, self.arguments[0])

    def target_box(self, block: _Block) -> Box:
        return self._box(block, [strip.target for strip in block], self.out_strides, self.arguments[1])

    def _box(self, block: _Block, first: Sequence[int], strides: Sequence[int], argument: str) -> Box:
        box = _box([strip.rows for strip in block], first, strides, self.operand.itemsize)
        return _checked(box, f'{self.call} "{self.operand.spec}"', argument)


# Boxes, routes, moves


def _box(extents: Sequence[int], first: Sequence[int], strides: Sequence[int], itemsize: int) -> Box:
    """The box of `extents` elements from index `first` on: dims that lie like one are one, the innermost is the run."""
    dims: list[tuple[int, int]] = []
    for extent, stride in zip(extents, strides, strict=True):
        if extent == 1:
            continue
        if dims and dims[-1][1] == extent * stride:
            extent *= dims.pop()[0]
        dims.append((extent, stride))
    run = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    offset = sum(row * stride for row, stride in zip(first, strides, strict=True))
    return Box(
        offset * itemsize,
        run * itemsize,
        tuple(extent for extent, _ in dims),
        tuple(stride * itemsize for _, stride in dims),
    )


def _checked(box: Box, subject: str, argument: str) -> Box:
    if len(box.extents) > MAX_DIMS:
        came = f"{len(box.extents)}: {box.extents} with strides of {box.strides} bytes"
        cure = "Make it contiguous, or join dims that keep their order with a reshape."
        raise ShapeError(f"{subject}: `{argument}` needs at most {MAX_DIMS} strided dims; got {came}. {cure}")
    return box


def _next_place(end: int) -> int:
    """Where on a wire the next box begins."""
    return -(-end // WIRE_ALIGN) * WIRE_ALIGN


def _route(boxes: Iterable[tuple[int, Box]]) -> Route:
    """Boxes of (tensor number, box) strung on a wire, each from a multiple of 16 on."""
    items: list[Item] = []
    end = payload = 0
    for number, box in boxes:
        at = _next_place(end)
        items.append(Item(number, at, box))
        end = at + box.bytes
        payload += box.bytes
    return Route(tuple(items), 0, end, payload)


def _source_route(geometries: Sequence[_Geometry], source: int, target: int) -> Route:
    return _route((g.number, g.source_box(block)) for g in geometries for block in g.blocks(source, target))


def _target_route(geometries: Sequence[_Geometry], source: int, target: int) -> Route:
    return _route((g.number, g.target_box(block)) for g in geometries for block in g.blocks(source, target))


def _slice(route: Route, lo: int, size: int) -> Route:
    inside = (min(lo + size, item.at + item.box.bytes) - max(lo, item.at) for item in route.items)
    return Route(route.items, lo, size, sum(max(0, count) for count in inside))


def _joined(whole_from: Route, whole_to: Route, rank: int, ranks: int) -> Moves:
    slices = list(enumerate(cut_wire(whole_from.bytes, ranks)))
    send = {peer: _slice(whole_from, *cut) for peer, cut in slices}
    receive = {peer: _slice(whole_to, *cut) for peer, cut in slices}
    return _moves(Kind.ALL_REDUCE, rank, ranks, send, receive, send[rank], receive[rank])


def _moves(
    kind: Kind,
    rank: int,
    ranks: int,
    send: Mapping[int, Route],
    receive: Mapping[int, Route],
    own_from: Route,
    own_to: Route,
) -> Moves:
    def by_rank(routes: Mapping[int, Route]) -> tuple[Route, ...]:
        return tuple(Route() if peer == rank else routes[peer] for peer in range(ranks))

    return Moves(kind, rank, ranks, by_rank(send), by_rank(receive), own_from, own_to)


# Checks


def _kind(tensors: Sequence[Operand], all_reduce: AllReduce, call: str) -> Kind:
    if not tensors:
        raise ShapeError(f"{call}: `tensors` needs at least one tensor; got none. Leave the call out on all ranks.")
    names = {tensor.spec.kind_name if tensor.spec.partial else "copy" for tensor in tensors}
    if len(names) > 1:
        texts = ", ".join(f'"{tensor.spec}"' for tensor in tensors)
        cure = "Make a call of each kind."
        raise SpecError(f"{call}: `specs` need all copies, all reduce_scatter or all all_reduce; got {texts}. {cure}")
    if names == {"copy"}:
        return Kind.COPY
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    if len(dtypes) > 1:
        cure = "Make a call for each dtype, or cast."
        raise DtypeError(f"{call}: `tensors` of a reduction need one dtype; got {' and '.join(dtypes)}. {cure}")
    return Kind.ALL_REDUCE if names == {"all_reduce"} and all_reduce is AllReduce.JOINED else Kind.REDUCE


def _check_distinct(shape: Sequence[int], strides: Sequence[int], subject: str, argument: str) -> None:
    """Every element of an output needs memory of its own. Strides in elements."""
    if len(shape) != len(strides):
        came = f"{len(strides)}: {tuple(strides)}"
        raise ShapeError(f"{subject}: `{argument}` needs {len(shape)} dims; got {came} as strides. Reshape it.")
    reach = 0
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent > 1 and stride <= reach and 0 not in shape:
            cure = "Pass a tensor that is not expanded, or leave it out."
            came = f"shape {tuple(shape)} with strides {tuple(strides)}"
            raise AliasError(f"{subject}: `{argument}` needs memory of its own for each element; got {came}. {cure}")
        reach += (extent - 1) * stride


def _shares(rows: int, given: Sequence[int] | None, ranks: int, subject: str, argument: str) -> tuple[int, ...]:
    if given is None and rows % ranks == 0:
        return (rows // ranks,) * ranks
    if given is None:
        needed = f"of None needs dim 0 of `{argument}` divisible by {ranks} ranks; got {rows} rows"
        raise ShapeError(f"{subject} {needed}. Pass in_sizes/out_sizes for uneven shards.")
    if len(given) != ranks or min(given) < 0 or sum(given) != rows:
        needed = f"needs {ranks} row counts that add up to {rows}, dim 0 of `{argument}`; got {list(given)}"
        raise ShapeError(f"{subject} {needed}. A rank without rows has 0.")
    return tuple(given)
