"""The tokens along one dim of an attention call, part by part: how many, on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from purlin_core.errors import ShapeError
from purlin_diffusion.attention.layout import REST, Part
from purlin_diffusion.cut import Stretch
from purlin_diffusion.segments import Division


@dataclass(frozen=True)
class Tokens:
    """names[i] stands for whole[i] tokens, of which rank r holds shares[i][r]; shares[i] is None where every rank holds them all."""

    names: tuple[str, ...]
    whole: tuple[int, ...]
    shares: tuple[tuple[int, ...] | None, ...]
    rank: int
    ranks: int

    @property
    def sharded(self) -> bool:
        return any(shares is not None for shares in self.shares)

    @property
    def total(self) -> int:
        return sum(self.whole)

    @property
    def sharded_total(self) -> int:
        """Without those that every rank holds."""
        return sum(whole for whole, shares in zip(self.whole, self.shares, strict=True) if shares is not None)

    def local(self, rank: int) -> int:
        return sum(
            whole if shares is None else shares[rank] for whole, shares in zip(self.whole, self.shares, strict=True)
        )

    @property
    def mine(self) -> int:
        return self.local(self.rank)

    def stretches(self) -> list[Stretch]:
        """This rank's tokens among all, in order."""
        return [
            Stretch(whole, 0, whole) if shares is None else Stretch(whole, sum(shares[: self.rank]), shares[self.rank])
            for whole, shares in zip(self.whole, self.shares, strict=True)
        ]

    def text(self, *, cut: bool) -> str:
        """How a spec writes this dim: as it is on a rank (`cut`), or whole."""
        names = [
            name + "@" * (cut and shares is not None) for name, shares in zip(self.names, self.shares, strict=True)
        ]
        return f"({' '.join(names)})" if len(names) > 1 else names[0]

    def sizes(self) -> dict[str, Sequence[int] | int]:
        return {
            name: whole if shares is None else shares
            for name, whole, shares in zip(self.names, self.whole, self.shares, strict=True)
        }


def tokens_of(parts: Sequence[Part], length: int, *, division: Division, rank: int, rest: str, what: str) -> Tokens:
    """The tokens of `parts` in a dim of local `length`; `*` is called `rest` in specs. Raises ShapeError when they are not that many."""
    named = sum(_local(part, division, rank) for part in parts if part.name != REST)
    has_rest = any(part.name == REST for part in parts)
    if length < named or (length > named and not has_rest):
        text = " ".join(map(str, parts))
        raise ShapeError(
            f"sharded_attention: `{what}` needs {named} tokens on rank {rank} for the layout {text!r}; got {length}."
            " The plan's layout of this attention call does not fit the processor that makes it."
        )
    cut = [division.ranks > 1 and part.sharded and division.is_sharded(part.name) for part in parts]
    return Tokens(
        names=tuple(rest if part.name == REST else part.name for part in parts),
        whole=tuple(length - named if part.name == REST else division.total(part.name) for part in parts),
        shares=tuple(division.by_rank(part.name) if is_cut else None for part, is_cut in zip(parts, cut, strict=True)),
        rank=rank,
        ranks=division.ranks,
    )


def _local(part: Part, division: Division, rank: int) -> int:
    return division.local(part.name, rank) if part.sharded else division.total(part.name)
