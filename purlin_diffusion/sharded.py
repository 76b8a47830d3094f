"""One rank's part of one model: its plan carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from purlin_diffusion.arguments import check_arguments
from purlin_diffusion.attention.layout import AttentionLayout
from purlin_diffusion.attention.sharded import Sharding, sharded_attention
from purlin_diffusion.attention.task import Attend, Form
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.counters import Counters
from purlin_diffusion.cut import Cutter, whole
from purlin_diffusion.doors import Doors, Site, Wanted
from purlin_diffusion.doors.hooks import Around
from purlin_diffusion.entry import Cut, Entry
from purlin_diffusion.plan import Door, Plan
from purlin_diffusion.segments import Division


class ShardedModel:
    """A model with its doors open, for one rank: cut(), then run(). `around`, if given, stands around the model's own forward; `counted` goes on
    counting where another stopped."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        carrier: Carrier,
        mode: str,
        *,
        around: Around | None = None,
        counted: Counters | None = None,
    ) -> None:
        self.model, self.plan = model, plan
        self.division = Division(plan.segments, carrier.ranks)
        self._cutter = Cutter(self.division, carrier.rank)
        self._calls = counted.calls if counted else 0
        names = [segment.name for segment in plan.segments]
        self._tokens, self._kept = (dict(before) if before else dict.fromkeys(names, 0) for before in _before(counted))
        self.batch: int | None = None  # of the last root call
        self._sharding = Sharding(carrier, self.division, mode)
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
        self.division.start()
        self.batch = next(
            (value.shape[0] for value in arguments.values() if isinstance(value, Tensor) and value.ndim), None
        )
        return self._cutter.arguments(self.plan.arguments, arguments)

    def run(self, forward: Callable[..., Any], share: dict[str, Any]) -> Any:
        """The root call itself, with what cut() returned. Returns what one rank alone would, on every rank."""
        output = forward(**share)
        self._count()
        return output

    def counters(self) -> Counters:
        return Counters(self.carrier.rank, self._calls, dict(self._tokens), dict(self._kept))

    def close(self) -> None:
        self.doors.close()

    def _count(self) -> None:
        self._calls += 1
        for name in self._tokens:
            if self.division.knows(name):
                self._tokens[name] += self.division.local(name, self.carrier.rank)
                self._kept[name] += self.division.kept.get(name, 0)

    def _wanted(self, around: Around | None) -> Wanted:
        return Wanted(
            inputs={door.path: self._cut_inputs(door) for door in self.plan.doors if not door.outputs},
            outputs={door.path: self._cut_outputs(door) for door in self.plan.doors if door.outputs}
            | {path: self._make_whole(entry) for path, entry in self.plan.exits.items()},
            sites={path: Site(path, calls, self._attention) for path, calls in self.plan.calls.items()},
            around=around,
        )

    def _cut_inputs(self, door: Door) -> Callable[[dict[str, Any]], dict[str, Any]]:
        entries = {str(name): entry for name, entry in door.entries.items()}
        return lambda arguments: self._cutter.arguments(entries, arguments)

    def _cut_outputs(self, door: Door) -> Callable[[Any], Any]:
        return lambda output: _change_outputs(
            output, {int(i): entry for i, entry in door.entries.items()}, door.path, self._cutter
        )

    def _make_whole(self, entry: Cut) -> Callable[[Any], Any]:
        return lambda output: whole(output, entry.forms[0], self.division, self.carrier)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layout: AttentionLayout, call: Attend, form: Form
    ) -> Tensor:
        return sharded_attention(q, k, v, mask, layout, call, sharding=self._sharding, form=form)


def _before(counted: Counters | None) -> tuple[Mapping[str, int], Mapping[str, int]]:
    return (counted.tokens, counted.kept) if counted else ({}, {})


def _change_outputs(output: Any, entries: Mapping[int, Entry], path: str, cutter: Cutter) -> Any:
    if isinstance(output, Tensor):
        return cutter.value(entries[0], output, f"output of `{path}`")
    return tuple(
        cutter.value(entries[i], item, f"output {i} of `{path}`") if i in entries else item
        for i, item in enumerate(output)
    )
