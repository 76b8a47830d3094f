"""Cutting tensors to a rank's share, and making them whole again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from purlin_core.errors import ShapeError
from purlin_core.spec import Dim, Layout
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.compiled import exchange
from purlin_diffusion.entry import REST, Cut, Entry, Keys
from purlin_diffusion.segments import Division
from purlin_diffusion.tree import map_tensors


@dataclass(frozen=True)
class Stretch:
    """`tokens` rows of a dim, of which this rank keeps `keep` from `first` on."""

    tokens: int
    first: int
    keep: int


def take(x: Tensor, dim: int, stretches: Sequence[Stretch]) -> Tensor:
    """What a rank keeps of `x` along `dim`; a view where it is one piece."""
    pieces, start = [], 0
    for stretch in stretches:
        pieces.append(x.narrow(dim, start + stretch.first, stretch.keep))
        start += stretch.tokens
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def stretch(division: Division, name: str, rank: int) -> Stretch:
    """All tokens of segment `name`, and `rank`'s share."""
    return Stretch(division.total(name), division.first(name, rank), division.local(name, rank))


def map_entry(entry: Entry, value: Any, change: Callable[[Cut, Tensor, str], Tensor], where: str) -> Any:
    """`value`, a tensor or any nest of them, with every tensor of which `entry` knows layouts changed; change(its entry, it, its name in errors)."""
    if isinstance(entry, Keys):
        if not isinstance(value, Mapping):
            return value
        return {
            key: map_entry(entry.entries[key], item, change, f"{where}[{key!r}]") if key in entry.entries else item
            for key, item in value.items()
        }
    if not entry.forms:
        return value
    return map_tensors(value, lambda x: change(entry, x, where))


@dataclass(frozen=True)
class Cutter:
    """Cuts for one rank by plan entries. Tensors that are cut already, and dims of size 1 beside a longer segment, pass."""

    division: Division
    rank: int

    def arguments(self, entries: Mapping[str, Entry], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """`arguments` with those cut that have an entry, in the plan's order: the first tensor of a segment measures it. Raises ShapeError."""
        done = {
            name: self.value(entry, arguments[name], f"`{name}`")
            for name, entry in entries.items()
            if name in arguments
        }
        return {**arguments, **done}

    def value(self, entry: Entry, value: Any, where: str) -> Any:
        """`value`, a tensor or any nest of lists, tuples and dicts of them, cut as `entry` says. Raises ShapeError."""
        return map_entry(entry, value, self._tensor, where)

    def _tensor(self, entry: Cut, x: Tensor, where: str) -> Tensor:
        form = entry.form(x.ndim)
        if form is not None:
            return self._cut(x, form, where)
        if entry.whole:
            return x
        raise ShapeError(
            f"{where} needs the dims ({entry}); got shape {tuple(x.shape)}. Its plan knows no other form of it."
        )

    def _cut(self, x: Tensor, form: Layout, where: str) -> Tensor:
        dim = form.sharded_dim
        if dim is None:  # its batch alone may be cut, see guidance.py
            return x
        self._measure(form.dims[dim], x.shape[dim], x.device)
        stretches = self._stretches(form.dims[dim], x.shape[dim])
        tokens = sum(piece.tokens for piece in stretches)
        if x.shape[dim] == tokens:
            return take(x, dim, stretches)
        if x.shape[dim] == 1 or x.shape[dim] == sum(piece.keep for piece in stretches):
            return x
        raise ShapeError(
            f"{where} needs {tokens} rows in dim {dim} ({form.dims[dim]}), or this rank's {sum(piece.keep for piece in stretches)};"
            f" got shape {tuple(x.shape)}. Pass it for all tokens of this call."
        )

    def _measure(self, dim: Dim, tokens: int, device: torch.device) -> None:
        """The one segment of `dim` that is not measured yet has what the others leave."""
        unknown = [name for name in dim.names if name != REST and not self.division.knows(name)]
        if len(unknown) == 1 and REST not in dim.names:
            known = sum(self.division.total(name) for name in dim.names if name != unknown[0])
            self.division.measure(unknown[0], tokens - known, device)

    def _stretches(self, dim: Dim, tokens: int) -> list[Stretch]:
        pieces = {name: stretch(self.division, name, self.rank) for name in dim.names if name != REST}
        rest = tokens - sum(piece.tokens for piece in pieces.values())
        return [pieces[name] if name in pieces else Stretch(rest, 0, rest) for name in dim.names]


def whole(x: Tensor, form: Layout, division: Division, carrier: Carrier) -> Tensor:
    """All ranks' shares of `x`, which is cut as `form` says, put together on every rank. Raises ShapeError."""
    dim = form.sharded_dim
    assert dim is not None, "entry.py lets no other through"
    if division.ranks == 1 or not any(division.is_sharded(name) for name in form.dims[dim].names):
        return x
    left = " ".join(dim_text(each.names, division) for each in form.dims)
    return exchange(carrier, [x], [f"{left} -> {left.replace('@', '')}"], division.sizes(form.dims[dim].names))[0]


def dim_text(names: Sequence[str], division: Division) -> str:
    """How a spec writes a dim of these names: the segments that are cut in this forward get their `@`."""
    text = " ".join(name + "@" * division.is_sharded(name) for name in names)
    return f"({text})" if len(names) > 1 else text
