"""Moves in words: a line for each route, and beside it the bytes that shapes alone say should reach a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from purlin_core.moves import Item, Kind, Moves, Route
from purlin_core.plan import Operand, holdings_of, local_shape, received_bytes, sent_bytes


@dataclass(frozen=True)
class Formula:
    """Bytes that reach a rank over the wire, from shapes alone: in words and numbers, and as a number."""

    text: str
    received_bytes: int


def formulas(tensors: Sequence[Operand], moves: Moves) -> tuple[Formula, ...]:
    """A formula for each tensor of the call (one for all in a joined all-reduce). It looks at no box of `moves`."""
    if moves.kind is Kind.ALL_REDUCE:
        total = sum(prod(tensor.shape) * tensor.itemsize for tensor in tensors)
        mine, peers = moves.own_from.payload, moves.ranks - 1
        value = peers * mine + total - mine
        text = (
            f"all_reduce, joined: (ranks - 1) x my slice + other slices = {peers} x {mine} + {total - mine} = {value} B"
        )
        return (Formula(text, value),)
    return tuple(_formula(tensor, moves.rank, moves.ranks) for tensor in tensors)


def _formula(tensor: Operand, rank: int, ranks: int) -> Formula:
    spec, kind = tensor.spec, tensor.spec.kind_name
    lengths = tensor.lengths(rank=rank, ranks=ranks)
    after = holdings_of(spec.right, lengths, rank)
    if spec.partial:
        part = prod(local_shape(spec.right, after)) * tensor.itemsize
        value = (ranks - 1) * part
        return Formula(f"{kind}: (ranks - 1) x my part = {ranks - 1} x {part} = {value} B", value)
    if kind == "local":
        return Formula("local: 0 B", 0)
    before = holdings_of(spec.left, lengths, rank)
    rows = {dim.names: sum(after[name].hi - after[name].lo for name in dim.names) for dim in spec.left.dims}
    sharded = next(dim for dim in spec.left.dims if dim.sharded)
    row_bytes = tensor.itemsize * prod(count for names, count in rows.items() if names != sharded.names)
    moved = [segment.name for segment in sharded.segments if segment.sharded]
    have, had = (sum(side[name].hi - side[name].lo for name in moved) * row_bytes for side in (after, before))
    words = {"all_gather": "output - own shard", "all_to_all": "output - own block"}.get(kind, "output - own rows")
    return Formula(f"{kind} of {' '.join(moved)}: {words} = {have} - {had} = {have - had} B", have - had)


def explain(tensors: Sequence[Operand], moves: Moves) -> str:
    """The moves as a table, and the bytes they should take."""
    texts = [formula.text for formula in formulas(tensors, moves)]
    numbered = [f"{i}: {text}" for i, text in enumerate(texts)] if len(texts) > 1 else texts
    return "\n".join([*numbered, explain_moves(moves)])


def explain_moves(moves: Moves) -> str:
    """A line for each route: peer, bytes, boxes. A box is tensor+offset[extent/stride ...]:run, all in bytes."""
    lines = [
        f"rank {moves.rank} of {moves.ranks}: sends {sent_bytes(moves)} B, receives {received_bytes(moves)} B",
        f"{'peer':>6} {'bytes':>12}  boxes: tensor+offset[extent/stride ...]:run",
    ]
    for peer, (send, receive) in enumerate(zip(moves.send, moves.receive, strict=True)):
        if peer != moves.rank:
            lines += [_line(f"to {peer}", send), _line(f"from {peer}", receive)]
    return "\n".join([*lines, _line("own", moves.own_from), _line("into", moves.own_to)])


def _line(peer: str, route: Route, most: int = 4) -> str:
    boxes = "  ".join(_box_text(item) for item in route.items[:most])
    more = f"  and {len(route.items) - most} more" * (len(route.items) > most)
    whole = not route.items or route.bytes == route.items[-1].at + route.items[-1].box.bytes
    part = f"[{route.lo}, {route.lo + route.bytes}) of " * (not whole)
    return f"{peer:>6} {route.payload:>12}  {part}{boxes}{more}".rstrip()


def _box_text(item: Item) -> str:
    box = item.box
    steps = " ".join(f"{extent}/{stride}" for extent, stride in zip(box.extents, box.strides, strict=True))
    return f"{item.tensor}+{box.offset}{f'[{steps}]' * bool(steps)}:{box.run}"
