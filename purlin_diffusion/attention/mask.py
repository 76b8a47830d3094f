"""Masks travel with their tokens.

A mask [.., heads, queries, keys], broadcast as torch does, comes in one of three extents along queries and along keys: one row for all; the whole,
in the order one GPU has; or this rank's own. Which one is decided from lengths alone, in a way that comes out alike on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from purlin_core.errors import ShapeError
from purlin_diffusion.attention.task import Form
from purlin_diffusion.attention.tokens import Tokens
from purlin_diffusion.cut import take


class Extent(Enum):
    ONE = auto()
    WHOLE = auto()
    MINE = auto()


@dataclass(frozen=True)
class MaskShape:
    """What a mask covers. `heads`: it differs by head. `rows_dim` is None where a mask has no dim of queries."""

    rows: Extent
    keys: Extent
    heads: bool
    rows_dim: int | None

    def spec(self, queries: Tokens, keys: Tokens, ndim: int, *, split_heads: bool) -> str:
        """The spec that makes this mask whole; with `split_heads`, for this rank's heads."""
        left, right = _names(ndim), _names(ndim)
        if self.keys is Extent.MINE:
            left[-1], right[-1] = keys.text(cut=True), keys.text(cut=False)
        if self.rows is Extent.MINE:
            assert self.rows_dim is not None
            left[self.rows_dim], right[self.rows_dim] = queries.text(cut=True), queries.text(cut=False)
        if split_heads:
            left[-3], right[-3] = "h", "h@"
        return f"{' '.join(left)} -> {' '.join(right)}"


def mask_shape(mask: Tensor, *, form: Form, batch: int, queries: Tokens, keys: Tokens) -> MaskShape:
    """What `mask` covers. Raises ShapeError when its lengths fit neither all tokens nor this rank's."""
    n = mask.shape[-1]
    if n not in (keys.total, keys.mine):
        raise _misfit(mask, "keys", keys)
    along_keys = _extent(n, keys, mask)
    if mask.ndim == 1 or (mask.ndim == 2 and form.key_masks and mask.shape[0] == batch):
        return MaskShape(Extent.ONE, along_keys, heads=False, rows_dim=None)
    n = mask.shape[-2]
    if n not in (1, queries.total, queries.mine):
        raise _misfit(mask, "queries", queries)
    rows = Extent.ONE if n == 1 else _extent(n, queries, mask)
    if rows is Extent.MINE and along_keys is Extent.MINE and keys.sharded:
        raise ShapeError(
            f"sharded_attention: `mask` needs all queries or all keys; got {tuple(mask.shape)}, this rank's queries by this rank's keys,"
            " which leaves out what they are to other ranks' keys. Build it from whole lengths."
        )
    return MaskShape(rows, along_keys, heads=mask.ndim >= 3 and mask.shape[-3] > 1, rows_dim=mask.ndim - 2)


def my_rows(mask: Tensor, shape: MaskShape, queries: Tokens) -> Tensor:
    """`mask` for this rank's queries."""
    if shape.rows is not Extent.WHOLE or not queries.sharded:
        return mask
    assert shape.rows_dim is not None
    return take(mask, shape.rows_dim, queries.stretches())


def _extent(n: int, tokens: Tokens, mask: Tensor) -> Extent:
    if not tokens.sharded:
        return Extent.WHOLE
    if (
        max(map(tokens.local, range(tokens.ranks))) == tokens.total
    ):  # one rank holds all, the others none: it could not tell
        raise ShapeError(
            f"sharded_attention: `mask` of {tuple(mask.shape)} with {tokens.total} tokens on {tokens.ranks} ranks: all lie on one rank."
            " Use fewer ranks for so few tokens."
        )
    return Extent.WHOLE if n == tokens.total else Extent.MINE


def _misfit(mask: Tensor, which: str, tokens: Tokens) -> ShapeError:
    return ShapeError(
        f"sharded_attention: `mask` needs {tokens.total} {which} (all) or {tokens.mine} (this rank's); got {tuple(mask.shape)}."
        " A mask must follow the tokens of its call."
    )


def _names(ndim: int) -> list[str]:
    return ["mb", "mh", "mq", "mk"][-ndim:] if ndim <= 4 else [f"m{i}" for i in range(ndim)]
