"""How the tokens of one forward are divided over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from purlin_core.errors import ShapeError
from purlin_diffusion.plan import Segment


def share(segment: Segment, tokens: int, rank: int, ranks: int, *, last_first: bool = False) -> int:
    """Tokens `rank` holds, as even as units allow; a part of a unit goes to the last rank. `last_first`: extra units go to the last ranks first.

    One formula without a choice in it, for `tokens` may be a symbol: a choice would make torch.compile's graph right for some lengths only.
    """
    units = tokens // segment.unit
    mine = (units + (rank if last_first else ranks - 1 - rank)) // ranks * segment.unit
    return mine + tokens % segment.unit if rank == ranks - 1 else mine


def divide(segment: Segment, tokens: int, ranks: int, *, last_first: bool = False) -> tuple[int, ...]:
    """share() of every rank."""
    return tuple([share(segment, tokens, rank, ranks, last_first=last_first) for rank in range(ranks)])


class Division:
    """The lengths of a plan's segments in the forward that runs, and each rank's share. The same on every rank.

    A segment is measured where it is first cut; every later cut of the forward must agree. A length is kept as the extent of a tensor without bytes,
    see compiled.py. Segments are sharded, but those of which a rank would hold fewer tokens than the plan's `min`: they stay whole. In a forward that
    starts `undivided` all do: ranks share its batch, see guidance.py. Compiled code may branch on that, for dynamo guards it as any flag.
    """

    def __init__(self, segments: Sequence[Segment], ranks: int) -> None:
        self.ranks = ranks
        self._undivided = False
        self._extents: dict[str, Tensor] = {}
        # odd segments favour the last ranks, so that the extra tokens spread
        self._segments = {segment.name: (segment, bool(i % 2)) for i, segment in enumerate(segments)}

    @property
    def kept(self) -> dict[str, int]:
        """Lengths of the segments that stay whole where others are divided."""
        if self._undivided:
            return {}
        return {name: self.total(name) for name in self._extents if not self.is_sharded(name)}

    @property
    def shares(self) -> dict[str, tuple[int, ...]]:
        """Tokens by rank of the segments that are sharded."""
        return {name: self.by_rank(name) for name in self._extents if self.is_sharded(name)}

    def start(self, *, undivided: bool = False) -> None:
        """Forget the last forward."""
        self._extents.clear()
        self._undivided = undivided

    def knows(self, name: str) -> bool:
        return name in self._extents

    def measure(self, name: str, tokens: int, device: torch.device | None = None) -> None:
        """Divide segment `name`, which has `tokens` tokens over all ranks. `device`: where the forward computes."""
        self._extents[name] = torch.empty((tokens, 0), dtype=torch.uint8, device=device)

    def is_sharded(self, name: str) -> bool:
        """Whether ranks hold shares of `name`; not when they hold all of it, or nothing of it is known."""
        if self._undivided or name not in self._extents:
            return False
        least = self._segments[name][0].min
        return self.ranks == 1 or least == 0 or min(self.by_rank(name)) >= least

    def by_rank(self, name: str) -> tuple[int, ...]:
        """What the ranks' shares of `name` are when it is sharded."""
        segment, last_first = self._segments[name]
        return divide(segment, self.total(name), self.ranks, last_first=last_first)

    def total(self, name: str) -> int:
        """Tokens of `name` over all ranks. Raises ShapeError when nothing has entered under that name."""
        if name in self._extents:
            return self._extents[name].shape[0]
        raise ShapeError(
            f"segment `{name}`: its tokens are needed before any have entered the model. Check the plan's `enter`."
        )

    def local(self, name: str, rank: int) -> int:
        """Tokens of `name` that `rank` holds."""
        return self.by_rank(name)[rank] if self.is_sharded(name) else self.total(name)

    def first(self, name: str, rank: int) -> int:
        """Where `rank`'s tokens begin."""
        return sum(self.by_rank(name)[:rank]) if self.is_sharded(name) else 0

    def sizes(self, names: Iterable[str]) -> dict[str, Sequence[int] | int]:
        """What a spec needs to know of those of `names` that are segments."""
        return {
            name: self.by_rank(name) if self.is_sharded(name) else self.total(name)
            for name in names
            if self.knows(name)
        }
