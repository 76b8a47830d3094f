"""One rank's part of one model: its plan carried out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor, nn

from purlin_core.ranges import named
from purlin_diffusion.arguments import check_arguments
from purlin_diffusion.attention.layout import AttentionLayout
from purlin_diffusion.attention.sharded import sharded_attention
from purlin_diffusion.attention.task import Attend, Form
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.compiled import Sharding, current, running
from purlin_diffusion.counters import Counters
from purlin_diffusion.cut import Cutter, whole
from purlin_diffusion.doors import Doors, Site, Wanted
from purlin_diffusion.doors.hooks import Around
from purlin_diffusion.entry import Cut, Entry
from purlin_diffusion.graph.counts import GraphCounts
from purlin_diffusion.guidance import Manner, half, joined, rows_to_halve, stranger
from purlin_diffusion.plan import Door, Plan
from purlin_diffusion.segments import Division

Here: TypeAlias = "Callable[[], Sharding]"


@dataclass(frozen=True)
class Memo:
    """What a root call leaves known: its batch, the lengths of its segments, and what ShardedModel says of halves. A replay of it runs no Python that
    would find them."""

    batch: int | None
    lengths: Mapping[str, int]
    halved: int | None
    half_bytes: int


class ShardedModel:
    """A model with its doors open, for one rank: cut(), then run(). `around`, if given, stands around the model's own forward; `counted` goes on
    counting where another stopped."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        carrier: Carrier,
        manner: Manner,
        *,
        around: Around | None = None,
        counted: Counters | None = None,
    ) -> None:
        self.model, self.plan = model, plan
        self.division = Division(plan.segments, carrier.ranks)
        self._cutter = Cutter(self.division, carrier.rank)
        self._calls, self._halved = (counted.calls, counted.halved) if counted else (0, 0)
        names = [segment.name for segment in plan.segments]
        self._tokens, self._kept = (dict(before) if before else dict.fromkeys(names, 0) for before in _before(counted))
        self.batch: int | None = None  # of the last root call
        self.halved: int | None = None  # its rows, where ranks have computed half of them each
        self.half_bytes = 0  # of its output on this rank, before the halves were joined
        self.manner = manner
        self._sharding = Sharding(carrier, self.division, manner.mode)
        self.doors = Doors(model, self._wanted(around))

    @property
    def carrier(self) -> Carrier:
        return self._sharding.carrier

    @property
    def mode(self) -> str:
        return self._sharding.mode

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of the model's tensors."""
        return next((x.element_size() for x in self.model.parameters()), 4)

    def reconnect(self, carrier: Carrier) -> None:
        """Go on with another carrier of the same rank and ranks."""
        self._sharding = replace(self._sharding, carrier=carrier)

    def cut(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's share of the arguments of a root call, which are all ranks' alike; nothing moves.

        Raises ArgumentError and ShapeError, on every rank alike.
        """
        check_arguments(self.plan, arguments)
        entries = self.plan.arguments
        apart = not (self.manner.unhalved or stranger(self.plan, self.model))
        self.halved = rows_to_halve(entries, arguments) if apart else None
        self.division.start(undivided=self.halved is not None)
        self.batch = next(
            (value.shape[0] for value in arguments.values() if isinstance(value, Tensor) and value.ndim), None
        )
        if self.halved is not None:
            arguments = half(entries, arguments, self.halved, self.carrier.rank)
        return self._cutter.arguments(entries, arguments)

    def run(self, forward: Callable[..., Any], share: dict[str, Any], *, counted: bool = True) -> Any:
        """The root call itself, with what cut() returned. Returns what one rank alone would, on every rank. `counted`: no mere recording."""
        with named("purlin root call of ", type(self.model).__name__), running(self._sharding):
            output = forward(**share)
            if self.halved is not None and self.plan.result is not None:
                output, self.half_bytes = joined(output, self.plan.result, self.carrier, self.halved)
        if counted:
            self._count()
        return output

    def memo(self) -> Memo:
        """Of the last root call."""
        names = filter(self.division.knows, self._tokens)
        lengths = {name: self.division.total(name) for name in names}
        return Memo(self.batch, lengths, self.halved, self.half_bytes)

    def recall(self, memo: Memo) -> None:
        """A root call like that of `memo` was replayed."""
        self.division.start(undivided=memo.halved is not None)
        for name, tokens in memo.lengths.items():
            self.division.measure(name, tokens)
        self.batch, self.halved, self.half_bytes = memo.batch, memo.halved, memo.half_bytes
        self._count()

    def counters(self, graphs: GraphCounts | None = None) -> Counters:
        """`graphs`: what its session knows of them."""
        tokens, kept = dict(self._tokens), dict(self._kept)
        return Counters(self.carrier.rank, self._calls, tokens, kept, graphs or GraphCounts(), self._halved)

    def close(self) -> None:
        self.doors.close()

    def _count(self) -> None:
        self._calls += 1
        self._halved += self.halved is not None
        for name in self._tokens:
            if self.division.knows(name):
                self._tokens[name] += self.division.local(name, self.carrier.rank)
                self._kept[name] += self.division.kept.get(name, 0)

    def _wanted(self, around: Around | None) -> Wanted:
        here = self._weakly_here()
        return Wanted(
            inputs={door.path: _cut_inputs(door, here) for door in self.plan.doors if not door.outputs},
            outputs={door.path: _cut_outputs(door, here) for door in self.plan.doors if door.outputs}
            | {path: _make_whole(entry, here) for path, entry in self.plan.exits.items()},
            sites={path: Site(path, calls, self._attention) for path, calls in self.plan.calls.items()},
            around=around,
            blocks=self.plan.blocks,
        )

    def _weakly_here(self) -> Here:
        """This rank's sharding, for the doors of modules: diffusers keeps some modules in caches, which must keep neither model nor carrier."""
        weak = weakref.ref(self)

        def here() -> Sharding:
            sharded = weak()
            if sharded is None:
                raise RuntimeError("a module of a parallel model is called, and the model is gone")
            return sharded._sharding

        return here

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layout: AttentionLayout, call: Attend, form: Form
    ) -> Tensor:
        return sharded_attention(q, k, v, mask, layout, call, sharding=self._sharding, form=form)


def _cut_inputs(door: Door, here: Here) -> Callable[[dict[str, Any]], dict[str, Any]]:
    entries = {str(name): entry for name, entry in door.entries.items()}
    return lambda arguments: _cutter(here).arguments(entries, arguments)


def _cut_outputs(door: Door, here: Here) -> Callable[[Any], Any]:
    entries = {int(i): entry for i, entry in door.entries.items()}
    return lambda output: _change_outputs(output, entries, door.path, _cutter(here))


def _make_whole(entry: Cut, here: Here) -> Callable[[Any], Any]:
    def make_whole(output: Any) -> Any:
        sharding = current(here)
        return whole(output, entry.forms[0], sharding.division, sharding.carrier)

    return make_whole


def _cutter(here: Here) -> Cutter:
    """The cutter, for code that may be compiled."""
    sharding = current(here)
    return Cutter(sharding.division, sharding.carrier.rank)


def _before(counted: Counters | None) -> tuple[Mapping[str, int], Mapping[str, int]]:
    return (counted.tokens, counted.kept) if counted else ({}, {})


def _change_outputs(output: Any, entries: Mapping[int, Entry], path: str, cutter: Cutter) -> Any:
    if isinstance(output, Tensor):
        return cutter.value(entries[0], output, f"output of `{path}`")
    return tuple(
        cutter.value(entries[i], item, f"output {i} of `{path}`") if i in entries else item
        for i, item in enumerate(output)
    )
