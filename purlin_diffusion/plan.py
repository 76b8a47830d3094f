"""A plan: what there is to know of one diffusers class in order to shard it, as data.

Nothing here runs a model. validate.py checks a plan against the live class, sharded.py carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from purlin_core.spec import Layout
from purlin_diffusion.attention.layout import Calls, parse_calls
from purlin_diffusion.entry import BATCH, Cut, Entry, Keys, Written, batch_dim, layout_of, parse_entry
from purlin_diffusion.errors import PlanError

Guidance = Literal["none", "batched", "calls", "silent calls"]
RESERVED_NAMES = frozenset({"b", "h", "g", "d", "e", "rest", "whole", "local"})  # dims of the specs at an attention
OUTPUT = " ->"
OPTIONAL = "?"


@dataclass(frozen=True)
class Segment:
    """Tokens that are cut together. They stay in groups of `unit`; where a rank would hold fewer than `min`, the segment stays whole."""

    name: str
    unit: int = 1
    min: int = 0


@dataclass(frozen=True)
class Refusal:
    """What cannot be done, why, and what to do instead."""

    reason: str
    advice: str

    def __str__(self) -> str:
        return f"{self.reason}. {self.advice}"


@dataclass(frozen=True)
class Door:
    """Where tensors are cut on their way: the inputs of a module, or its outputs (`"rope ->"` in a plan)."""

    path: str
    outputs: bool
    entries: Mapping[str | int, Entry]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to shard one model class.

    model: the class, by name. written_for: the diffusers version it was read in.
    segments: the names of what is cut.
    forward: EVERY argument of the root forward, see entry.py; one that is not listed, or in `refuse`, and not None is refused by name.
    enter: where tensors are cut further in: path -> {argument: entry}, or "path ->" -> {output index: entry}.
    leave: where they are made whole again: path -> layout of its output.
    attention: path -> the layouts of the attention calls inside that module, see attention/layout.py.
    refuse: argument, or "argument.key" of a dict -> Refusal.
    cfg: how the pipelines of this class do guidance.
    output: where that is "batched", the layout of what the root returns, as `b c h w`: then ranks may share the batch, and every argument in
    `forward` that holds rows of it has a layout that names `b`. Empty: they share tokens only. rowwise: the attention processors with which they may,
    for each row of the batch is computed by itself: classes of diffusers by name, others as "module.Name".
    graph: "root", "blocks", or "none: reason". blocks: the repeated classes, for compile.

    Paths are those of named_modules; `*` stands for one name, and a last `?` says that a model may have none of them.
    Raises PlanError.
    """

    model: str
    written_for: str
    segments: tuple[Segment, ...]
    forward: Mapping[str, Written]
    attention: Mapping[str, tuple[str, ...]]
    enter: Mapping[str, Mapping[str | int, Written]] = field(default_factory=dict)
    leave: Mapping[str, str] = field(default_factory=dict)
    refuse: Mapping[str, Refusal] = field(default_factory=dict)
    cfg: Guidance = "none"
    output: str = ""
    rowwise: tuple[str, ...] = ()
    graph: str = "root"
    blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for segment in self.segments:
            _check_segment(segment)
        if self.cfg not in get_args(Guidance):
            raise PlanError(f"plan {self.model}: `cfg` needs one of {get_args(Guidance)}; got {self.cfg!r}.")
        if self.graph not in ("root", "blocks") and not self.graph.startswith("none: "):
            raise PlanError(f"plan {self.model}: `graph` needs 'root', 'blocks' or 'none: reason'; got {self.graph!r}.")
        known = {segment.name for segment in self.segments}
        if unknown := self._used_segments() - known:
            raise PlanError(
                f"plan {self.model}: no segment is called {', '.join(sorted(unknown))}; `segments` names {sorted(known)}."
            )
        self._check_batch(known)

    @cached_property
    def arguments(self) -> Mapping[str, Entry]:
        """`forward`, read."""
        return {name: parse_entry(written, f"forward[{name!r}]", batch=True) for name, written in self.forward.items()}

    @cached_property
    def result(self) -> Layout | None:
        """`output`, read."""
        return layout_of(self.output, "`output`", batch=True) if self.output else None

    @cached_property
    def doors(self) -> tuple[Door, ...]:
        """`enter`, read."""
        return tuple(_door(key, entries) for key, entries in self.enter.items())

    @cached_property
    def exits(self) -> Mapping[str, Cut]:
        """`leave`, read."""
        return {path: _exit(path, text) for path, text in self.leave.items()}

    @cached_property
    def calls(self) -> Mapping[str, Calls]:
        """`attention`, read."""
        return {path: parse_calls(texts) for path, texts in self.attention.items()}

    def _check_batch(self, segments: set[str]) -> None:
        """What is said of the batch; and that no layout without `@` was meant to cut a segment."""
        forms = [(name, form) for name, entry in self.arguments.items() for form in _forms(entry)]
        for name, form in forms:
            if form.sharded_dim is None and (forgotten := segments & form.segments.keys()):
                raise PlanError(
                    f"plan {self.model}: forward[{name!r}] needs a sharded segment; got {str(form)!r}, which names `{forgotten.pop()}` without `@`."
                    " Write it with its `@`, or call the dim otherwise: what has no `@` is whole but for the batch."
                )
        if self.result is None:
            return
        if self.cfg != "batched":
            raise PlanError(
                f"plan {self.model}: `output` joins halves of guidance in one batch; got cfg={self.cfg!r}. Leave `output` out."
            )
        if self.result.sharded_dim is not None or segments & self.result.segments.keys():
            raise PlanError(
                f"plan {self.model}: `output` needs a layout without segments, as `b c h w`; got {self.output!r}."
            )
        if all(batch_dim(form) is None for _, form in forms):
            raise PlanError(
                f"plan {self.model}: `output` has a batch, and no argument in `forward` has."
                f" Write `{BATCH}` where its rows lie, as in `b c h w`."
            )
        if not self.rowwise:
            raise PlanError(
                f"plan {self.model}: `output` needs `rowwise`: the attention processors that compute each row of the batch by itself."
            )

    def _used_segments(self) -> set[str]:
        entries = [
            *self.arguments.values(),
            *self.exits.values(),
            *(entry for door in self.doors for entry in door.entries.values()),
        ]
        layouts = [layout for calls in self.calls.values() for layout in calls.layouts]
        return {name for user in (*entries, *layouts) for name in user.segments}


def _forms(entry: Entry) -> tuple[Layout, ...]:
    """All layouts in an entry."""
    if isinstance(entry, Keys):
        return tuple(form for each in entry.entries.values() for form in _forms(each))
    return entry.forms


def _check_segment(segment: Segment) -> None:
    if not segment.name.isidentifier() or segment.name in RESERVED_NAMES:
        raise PlanError(f"plan: segment {segment.name!r} needs a name other than {sorted(RESERVED_NAMES)}.")
    if segment.unit < 1 or segment.min < 0:
        raise PlanError(
            f"plan: segment {segment.name!r} needs unit >= 1 and min >= 0; got unit={segment.unit}, min={segment.min}."
        )


def _door(key: str, entries: Mapping[str | int, Written]) -> Door:
    outputs = key.endswith(OUTPUT)
    kind = int if outputs else str
    for name in entries:
        if not isinstance(name, kind):
            raise PlanError(
                f"plan: enter[{key!r}] needs {'output numbers' if outputs else 'argument names'}; got {name!r}."
            )
    return Door(
        key.removesuffix(OUTPUT),
        outputs,
        {name: parse_entry(written, f"enter[{key!r}]") for name, written in entries.items()},
    )


def _exit(path: str, text: str) -> Cut:
    entry = parse_entry(text, f"leave[{path!r}]")
    if not isinstance(entry, Cut) or len(entry.forms) != 1 or entry.whole:
        raise PlanError(f"plan: leave[{path!r}] needs one layout, as `b image@ c`; got {text!r}.")
    return entry
