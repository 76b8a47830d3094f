"""How the tokens of one forward are divided over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from purlin_core.errors import ShapeError
from purlin_diffusion.plan import Segment


def divide(segment: Segment, tokens: int, ranks: int, *, last_first: bool = False) -> tuple[int, ...]:
    """Tokens a rank, as even as units allow; a part of a unit goes to the last rank. `last_first`: extra units go to the last ranks first."""
    units, rest = divmod(tokens, segment.unit)
    least, extra = divmod(units, ranks)
    shares = [(least + (rank < extra)) * segment.unit for rank in range(ranks)]
    if last_first:
        shares.reverse()
    shares[-1] += rest
    return tuple(shares)


class Division:
    """The lengths of a plan's segments in the forward that runs, and each rank's share. The same on every rank.

    A segment is measured where it is first cut; every later cut of the forward must agree. `shares` holds the segments that are sharded, `kept` the
    lengths of those that stay whole because a rank would hold fewer tokens than the plan's `min`.
    """

    def __init__(self, segments: Sequence[Segment], ranks: int) -> None:
        self.ranks = ranks
        self.shares: dict[str, tuple[int, ...]] = {}
        self.kept: dict[str, int] = {}
        self._segments = {segment.name: (segment, bool(i % 2)) for i, segment in enumerate(segments)}

    def start(self) -> None:
        """Forget the last forward."""
        self.shares.clear()
        self.kept.clear()

    def knows(self, name: str) -> bool:
        return name in self.shares or name in self.kept

    def measure(self, name: str, tokens: int) -> None:
        """Divide segment `name`, which has `tokens` tokens over all ranks."""
        segment, last_first = self._segments[
            name
        ]  # odd segments favour the last ranks, so that the extra tokens spread
        shares = divide(segment, tokens, self.ranks, last_first=last_first)
        if self.ranks > 1 and min(shares) < segment.min:
            self.kept[name] = tokens
        else:
            self.shares[name] = shares

    def total(self, name: str) -> int:
        """Tokens of `name` over all ranks. Raises ShapeError when nothing has entered under that name."""
        if name in self.shares:
            return sum(self.shares[name])
        if name in self.kept:
            return self.kept[name]
        raise ShapeError(
            f"segment `{name}`: its tokens are needed before any have entered the model. Check the plan's `enter`."
        )

    def local(self, name: str, rank: int) -> int:
        """Tokens of `name` that `rank` holds."""
        return self.shares[name][rank] if name in self.shares else self.total(name)

    def first(self, name: str, rank: int) -> int:
        """Where `rank`'s tokens begin."""
        return sum(self.shares[name][:rank]) if name in self.shares else 0

    def sizes(self, names: Iterable[str]) -> dict[str, Sequence[int] | int]:
        """What a spec needs to know of those of `names` that are segments."""
        return {
            name: self.shares[name] if name in self.shares else self.kept[name] for name in names if self.knows(name)
        }
