"""Which tokens an attention call holds, as a plan writes it: `"text@ image@"`, `"image@ *"`, `"image@ -> image@ *"`, `"local"`.

A part with `@` is a segment of the plan, sharded over the ranks; without, it is a segment every rank holds whole. `*` is whatever is left, the same
on every rank. Queries stand before the arrow, keys and values after it; without an arrow both are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from purlin_diffusion.errors import PlanError

REST = "*"
AGAIN = "..."


@dataclass(frozen=True)
class Part:
    """A stretch of tokens: a segment's name, or `*`."""

    name: str
    sharded: bool = False

    def __str__(self) -> str:
        return self.name + "@" * self.sharded


@dataclass(frozen=True)
class AttentionLayout:
    """The parts of the query tokens and of the key tokens of one attention call, in order."""

    queries: tuple[Part, ...]
    keys: tuple[Part, ...]

    @property
    def segments(self) -> frozenset[str]:
        return frozenset(part.name for part in (*self.queries, *self.keys)) - {REST}

    def __str__(self) -> str:
        queries, keys = (" ".join(map(str, parts)) for parts in (self.queries, self.keys))
        return queries if queries == keys else f"{queries} -> {keys}"


@dataclass(frozen=True)
class Calls:
    """The layouts of the attention calls that one attention module makes, first to last."""

    layouts: tuple[AttentionLayout, ...]
    again: bool = False  # further calls have the last layout

    def __getitem__(self, call: int) -> AttentionLayout:
        """Layout of call number `call`, from 0. Raises PlanError when the plan knows of fewer calls."""
        if call < len(self.layouts):
            return self.layouts[call]
        if not self.again:
            raise PlanError(
                f"attention call {call + 1} of a module that makes {len(self.layouts)} by its plan ({self})."
                " Use a processor that diffusers ships for this class, or register a plan that names the layout of every call."
            )
        return self.layouts[-1]

    def __str__(self) -> str:
        return ", ".join(map(str, self.layouts)) + ", ..." * self.again


@lru_cache(maxsize=512)
def parse_layout(text: str) -> AttentionLayout:
    """The layout that `text` writes. Raises PlanError."""
    if text.strip() == "local":
        return parse_layout("* -> *")
    sides = [_parts(side, text) for side in text.split("->")]
    if len(sides) > 2:
        raise PlanError(f"attention layout {text!r}: needs at most one `->`. Write `queries -> keys`.")
    return AttentionLayout(sides[0], sides[-1])


def parse_calls(texts: Sequence[str]) -> Calls:
    """The layouts of a module's calls; a last `"..."` says that further calls are like the one before. Raises PlanError."""
    if isinstance(texts, str) or not texts or texts[0] == AGAIN:
        raise PlanError(f"attention layouts need a tuple with one text a call; got {texts!r}. Write ('text@ image@',).")
    again = texts[-1] == AGAIN
    return Calls(tuple(map(parse_layout, texts[: len(texts) - again])), again)


def _parts(side: str, text: str) -> tuple[Part, ...]:
    parts = tuple(Part(word.removesuffix("@"), word.endswith("@")) for word in side.split())
    if not parts:
        raise PlanError(f"attention layout {text!r}: a side without tokens. Write segment names, `name@`, or `*`.")
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise PlanError(
            f"attention layout {text!r}: a name stands twice on one side. Every part has a name of its own."
        )
    for part in parts:
        if part.name == REST and part.sharded:
            raise PlanError(
                f"attention layout {text!r}: `*@`. What is left is the same on every rank; name a segment to shard it."
            )
        if part.name != REST and not part.name.isidentifier():
            raise PlanError(
                f"attention layout {text!r}: cannot read `{part.name}`. Write segment names, `name@`, or `*`."
            )
    return parts
