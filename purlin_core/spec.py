"""The spec language: what a collective means, never how it runs.

    "b (text@ image@) h d -> b (text image) h@ d"

    spec    = side "->" side          the layout every rank passes, then the one it gets
    side    = ["+"] dim ...           "+", on the left only: every rank holds a partial result, to be reduced
    dim     = segment | "(" segment ... ")"     in brackets: segments laid one after the other
    segment = name ["@" ["~" rows [":" rows]]]

`name@` is sharded over the ranks, in rank order. `name@~1` comes with one row of each neighbour and `name@~1:0` with
one before and none after: a halo, on the right only. A name without `@` is whole: on the left, unless partial, every
rank has a copy and uses its own. Both sides name the same names; dims may change places, and so may the segments of one
dim among themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from purlin_core.errors import ShapeError, SpecError

if TYPE_CHECKING:
    from torch import Tensor

KindName: TypeAlias = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "halo", "local"]
Op: TypeAlias = Literal["sum", "avg", "max", "min"]
Sizes: TypeAlias = Mapping[str, Sequence[int] | int]


@dataclass(frozen=True)
class Segment:
    """A stretch of one dim. `before` and `after` count the halo rows that come with a shard."""

    name: str
    sharded: bool = False
    before: int = 0
    after: int = 0

    @property
    def halo(self) -> bool:
        return bool(self.before or self.after)

    def __str__(self) -> str:
        rows = f"{self.before}" if self.before == self.after else f"{self.before}:{self.after}"
        return self.name + "@" * self.sharded + f"~{rows}" * self.halo


@dataclass(frozen=True)
class Dim:
    """One dim of a tensor: its segments, laid one after the other."""

    segments: tuple[Segment, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(segment.name for segment in self.segments)

    @property
    def sharded(self) -> bool:
        return any(segment.sharded for segment in self.segments)

    def __str__(self) -> str:
        text = " ".join(map(str, self.segments))
        return f"({text})" if len(self.segments) > 1 else text


@dataclass(frozen=True)
class Layout:
    """One side of a spec, outermost dim first. At most one dim holds sharded segments."""

    dims: tuple[Dim, ...]

    @cached_property
    def segments(self) -> Mapping[str, Segment]:
        """Every segment by its name, in order."""
        return {segment.name: segment for dim in self.dims for segment in dim.segments}

    @cached_property
    def sharded_dim(self) -> int | None:
        return next((i for i, dim in enumerate(self.dims) if dim.sharded), None)

    def __str__(self) -> str:
        return " ".join(map(str, self.dims))


@dataclass(frozen=True)
class Lengths:
    """Rows of every name: `whole`, and `shards`, rank by rank, where the name is sharded on either side."""

    whole: Mapping[str, int]
    shards: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Spec:
    """A parsed spec. `str(spec)` is its canonical text: equal specs, equal texts."""

    left: Layout
    right: Layout
    partial: bool = False

    @staticmethod
    def parse(text: str) -> Spec:
        """The spec of `text`; cached. Raises SpecError, which shows the place, the cause and the cure."""
        return _parse(text)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return f"{'+' * self.partial}{self.left} -> {self.right}"

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Dim i of the right side is dim order[i] of the left side."""
        place = {name: i for i, dim in enumerate(self.left.dims) for name in dim.names}
        return tuple(place[dim.names[0]] for dim in self.right.dims)

    @cached_property
    def kind_name(self) -> KindName:
        """The collective this is, for texts. Where segments differ, one that moves bytes names the whole."""
        right = self.right.segments
        if self.partial:
            return "all_reduce" if self.right.sharded_dim is None else "reduce_scatter"
        if any(segment.halo for segment in right.values()):
            return "halo"
        if all(right[name].sharded for name, segment in self.left.segments.items() if segment.sharded):
            return "local"
        here, there = self.left.sharded_dim, self.right.sharded_dim
        return "all_gather" if there is None or self.order[there] == here else "all_to_all"

    def lengths(
        self,
        shape: Sequence[int],
        *,
        rank: int,
        ranks: int,
        sizes: Sizes | None = None,
        call: str = "redistribute",
        argument: str = "x",
    ) -> Lengths:
        """What the local `shape` of `rank`'s input and `sizes` say of every name.

        `sizes[name]` is a row count a rank (0 allowed), or an int: the whole length, split equally where the name is
        sharded. Without sizes a sharded name is split equally. In a dim of several segments all but one need sizes.
        Raises ShapeError.
        """
        return _Lengths(self, rank, ranks, sizes or {}, call, argument).resolve(shape)

    def reference(self, inputs: Sequence[Tensor], *, sizes: Sizes | None = None, op: Op = "sum") -> list[Tensor]:
        """The meaning: outputs of all ranks from the inputs of all ranks. Plain torch, slow; see reference.py."""
        from purlin_core.reference import reference  # the language itself needs no torch

        return reference(self, inputs, sizes=sizes, op=op)


def check_sizes(specs: Iterable[Spec], sizes: Sizes | None, *, call: str = "redistribute") -> None:
    """Raise ShapeError when `sizes` speaks of a name that none of `specs` has."""
    specs = list(specs)
    for name in sizes or ():
        if not any(name in spec.left.segments for spec in specs):
            texts = ", ".join(dict.fromkeys(f'"{spec}"' for spec in specs))
            cure = "Remove it, or name that dim in the spec."
            raise ShapeError(f"{call}: `sizes` needs names of {texts}; got {name!r}. {cure}")


@dataclass(frozen=True)
class _Lengths:
    """From a rank's local shape and the sizes it was given to the lengths of all names."""

    spec: Spec
    rank: int
    ranks: int
    sizes: Sizes
    call: str
    argument: str

    def resolve(self, shape: Sequence[int]) -> Lengths:
        left = self.spec.left
        if len(shape) != len(left.dims):
            cure = "Reshape it, or name every dim in the spec."
            raise self.error(f"needs {len(left.dims)} dims ({left})", f"shape {tuple(shape)}", cure)
        whole: dict[str, int] = {}
        for i, dim in enumerate(left.dims):
            for segment in dim.segments:
                if segment.name in self.sizes:
                    whole[segment.name] = self.given(segment.name)
            self.fill(i, dim, shape[i], whole)
        right = self.spec.right
        sharded = [name for name in whole if left.segments[name].sharded or right.segments[name].sharded]
        return Lengths(whole, {name: self.shards(name, whole[name]) for name in sharded})

    def given(self, name: str) -> int:
        """Whole length of a name that has sizes."""
        size: Any = self.sizes[name]
        rows = tuple(size) if _is_rows(size) else (size,)
        argument, cure = f"sizes[{name!r}]", "A rank without rows has 0."
        if any(count < 0 for count in rows):
            raise self.error("needs row counts of 0 or more", str(size), cure, argument)
        if _is_rows(size) and len(rows) != self.ranks:
            raise self.error(f"needs a row count for each of {self.ranks} ranks", f"{list(rows)}", cure, argument)
        return sum(rows)

    def fill(self, i: int, dim: Dim, length: int, whole: dict[str, int]) -> None:
        """Into `whole`, the name of left dim `i` that has no sizes: it takes what the others leave of `length` rows."""
        missing = [segment for segment in dim.segments if segment.name not in whole]
        local = sum(self.local(segment, whole[segment.name]) for segment in dim.segments if segment not in missing)
        if len(missing) > 1:
            names = " and ".join(segment.name for segment in missing)
            cure = "Pass sizes={" + ", ".join(f"{segment.name!r}: ..." for segment in missing[:-1]) + "}."
            raise self.error(f"needs sizes for all but one segment of dim {i}, {dim}", f"none for {names}", cure)
        if length < local or (length > local and not missing):
            needed = f"needs {'at least ' if missing else ''}{local} rows in dim {i}, {dim}, on rank {self.rank}"
            raise self.error(needed, str(length), "Correct `sizes`, or pass the tensor they speak of.")
        for segment in missing:
            whole[segment.name] = (length - local) * (self.ranks if segment.sharded else 1)

    def local(self, segment: Segment, whole: int) -> int:
        return self.shards(segment.name, whole)[self.rank] if segment.sharded else whole

    def shards(self, name: str, whole: int) -> tuple[int, ...]:
        size: Any = self.sizes.get(name)
        if size is not None and _is_rows(size):
            return tuple(size)
        rows, left_over = whole // self.ranks, whole % self.ranks
        if left_over:
            uneven = [rows + (rank < left_over) for rank in range(self.ranks)]
            cure = f"Pass sizes={{{name!r}: {uneven}}} for uneven shards."
            raise self.error(f"needs `{name}` divisible by {self.ranks} ranks", f"{whole} rows", cure)
        return (rows,) * self.ranks

    def error(self, needed: str, came: str, cure: str, argument: str = "") -> ShapeError:
        return ShapeError(f'{self.call} "{self.spec}": `{argument or self.argument}` {needed}; got {came}. {cure}')


def _is_rows(size: Any) -> bool:
    """Whether a name's sizes are counts a rank, and not its whole length, which is a symbol of no Python type while torch.compile traces."""
    return hasattr(size, "__len__") or not hasattr(size, "__index__")


_DIM = re.compile(r"\((?P<group>[^()]*)\)|(?P<stray>[()])|(?P<single>[^\s()]+)")
_WORD = re.compile(r"\S+")
_NAME = r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
_SEGMENT = re.compile(_NAME + r"(?P<sharded>@(?:~(?P<before>[0-9]+)(?::(?P<after>[0-9]+))?)?)?")


@lru_cache(maxsize=4096)
def _parse(text: str) -> Spec:
    return _Parser(text).spec()


@dataclass(frozen=True)
class _Side:
    layout: Layout
    places: Mapping[str, int]  # where in the text each name stands


@dataclass(frozen=True)
class _Parser:
    text: str

    def spec(self) -> Spec:
        arrow = self.text.find("->")
        if arrow < 0:
            raise self.error(len(self.text), "a spec has two sides", "Write `left -> right`, as in `s@ h -> s h@`.")
        again = self.text.find("->", arrow + 2)
        if again >= 0:
            raise self.error(again, "a second `->`", "A spec has two sides; two steps are two calls.")
        plus = re.match(r"\s*\+", self.text)
        left = self.side(plus.end() if plus else 0, arrow, "left")
        right = self.side(arrow + 2, len(self.text), "right")
        self.check_names(left, right)
        self.check_groups(left, right)
        self.check_shards(left, right, partial=plus is not None)
        self.check_halos(left, right, partial=plus is not None)
        return Spec(left.layout, right.layout, plus is not None)

    def side(self, start: int, end: int, which: str) -> _Side:
        dims: list[Dim] = []
        places: dict[str, int] = {}
        for match in _DIM.finditer(self.text, start, end):
            if match["stray"]:
                cause = f"`{match['stray']}` without its partner"
                raise self.error(match.start(), cause, "Segments of one dim stand in one pair of brackets: `(a b)`.")
            segments = []
            for word in _WORD.finditer(self.text, *match.span(match.lastgroup or 0)):
                segment = self.segment(word)
                if segment.name in places:
                    cause = f"`{segment.name}` stands twice on the {which}"
                    raise self.error(word.start(), cause, "Give every dim a name of its own.")
                places[segment.name] = word.start()
                segments.append(segment)
            if not segments:
                raise self.error(match.start(), "brackets around nothing", "Name the segments, as in `(text image)`.")
            dims.append(Dim(tuple(segments)))
        if not dims:
            raise self.error(end, f"no dim on the {which}", "Name every dim; a scalar can be passed as x.reshape(1).")
        return _Side(Layout(tuple(dims)), places)

    def segment(self, word: re.Match[str]) -> Segment:
        match = _SEGMENT.match(word[0])
        if match is None or match.end() < len(word[0]):
            read = match.end() if match else 0
            cure = (
                "A dim is a name such as `s`; `s@` is sharded, `s@~1` or `s@~1:0` has a halo, `(a b)` is two segments."
            )
            if word[0][read] == "+":
                cure = "`+` stands once, before the left side: every rank holds a partial result, as in `+n -> n@`."
            raise self.error(word.start() + read, f"cannot read `{word[0][read:]}`", cure)
        before = int(match["before"] or 0)
        after = int(match["after"]) if match["after"] else before
        return Segment(match["name"], match["sharded"] is not None, before, after)

    def check_names(self, left: _Side, right: _Side) -> None:
        for here, there, other in ((left, right, "right"), (right, left, "left")):
            for name, place in here.places.items():
                if name not in there.places:
                    cure = f"Both sides name the same dims: write `{name}` there too, or drop it here."
                    raise self.error(place, f"`{name}` is missing on the {other}", cure)

    def check_groups(self, left: _Side, right: _Side) -> None:
        dim_of = {name: dim for dim in left.layout.dims for name in dim.names}
        for dim in right.layout.dims:
            for name in dim.names:
                if set(dim.names) != set(dim_of[name].names):
                    cause = f"`{name}` lies in the dim `{dim_of[name]}` on the left, in `{dim}` on the right"
                    cure = "Segments of one dim stay together; cut or join tensors before the call."
                    raise self.error(right.places[name], cause, cure)

    def check_shards(self, left: _Side, right: _Side, *, partial: bool) -> None:
        for side, which in ((left, "left"), (right, "right")):
            sharded = [(dim, segment) for dim in side.layout.dims for segment in dim.segments if segment.sharded]
            for dim, segment in sharded:
                if partial and side is left:
                    cause = f"`{segment}` is sharded, and `+` says that every rank holds a partial result of all"
                    raise self.error(side.places[segment.name], cause, "Drop the `@` to reduce, the `+` to move.")
                if dim != sharded[0][0]:
                    cause = f"`{segment}` shards a second dim of the {which}, beside `{sharded[0][0]}`"
                    cure = "A side is sharded in one dim: use one call for each dim, each on its own mesh axis."
                    raise self.error(side.places[segment.name], cause, cure)

    def check_halos(self, left: _Side, right: _Side, *, partial: bool) -> None:
        for side in (left, right):
            for name, segment in side.layout.segments.items():
                if segment.halo and side is left:
                    cause, cure = (
                        f"`{segment}` has a halo on the left",
                        "A halo is what a rank gets: write it on the right.",
                    )
                elif segment.halo and partial:
                    cause, cure = f"`{segment}` has a halo of partial results", "Reduce first, then ask for the halo."
                elif segment.halo and not left.layout.segments[name].sharded:
                    cause = f"`{segment}` has a halo, but `{name}` is whole on the left"
                    cure = f"Write `{name}@` on the left too, or slice the whole tensor yourself."
                else:
                    continue
                raise self.error(side.places[name], cause, cure)

    def error(self, place: int, cause: str, cure: str) -> SpecError:
        line = re.sub(r"\s", " ", self.text)
        return SpecError(f"{cause}\n    {line}\n    {' ' * place}^\n{cure}")
