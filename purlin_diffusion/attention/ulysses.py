"""ulysses: one exchange turns this rank's tokens of all heads into all tokens of this rank's heads, one turns the output back."""

from __future__ import annotations

from torch import Tensor

from purlin_diffusion.attention.mask import Extent, MaskShape, mask_shape
from purlin_diffusion.attention.task import Task
from purlin_diffusion.attention.tokens import Tokens
from purlin_diffusion.compiled import exchange


def head_shares(heads: int, ranks: int) -> tuple[int, ...]:
    """Heads a rank, as even as they go; a rank may have none."""
    least, extra = divmod(heads, ranks)
    return tuple(least + (rank < extra) for rank in range(ranks))


def ulysses(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, task: Task) -> Tensor:
    """Attention of this rank's queries over all keys. Heads need not divide by the ranks; grouped keys stay with their queries."""
    queries, keys = task.queries, task.keys
    groups = head_shares(k.shape[2], task.carrier.ranks)
    heads = tuple(share * (q.shape[2] // k.shape[2]) for share in groups)
    sizes = {**queries.sizes(), **keys.sizes(), "h": heads, "g": groups}

    tensors, specs = (
        [q, k, v],
        [_to_heads(queries, "h", "d"), _to_heads(keys, "g", "d"), _to_heads(keys, "g", "e")],
    )
    shape = None
    if mask is not None:
        shape = mask_shape(mask, form=task.form, batch=q.shape[0], queries=queries, keys=keys)
        if Extent.MINE in (shape.keys, shape.rows):
            tensors.append(mask)
            specs.append(shape.spec(queries, keys, mask.ndim, split_heads=shape.heads))
    q, k, v, *moved = exchange(task.carrier, tensors, specs, sizes)
    if mask is not None and shape is not None:
        mask = moved[0] if moved else _my_heads(mask, shape, heads, task.carrier.rank)
    out = task.attend(q, k, v, mask)
    back = f"b {queries.text(cut=False)} h@ e -> b {queries.text(cut=True)} h e"
    return exchange(task.carrier, [out], [back], {**queries.sizes(), "h": heads})[0]


def _to_heads(tokens: Tokens, heads: str, width: str) -> str:
    return f"b {tokens.text(cut=True)} {heads} {width} -> b {tokens.text(cut=False)} {heads}@ {width}"


def _my_heads(mask: Tensor, shape: MaskShape, heads: tuple[int, ...], rank: int) -> Tensor:
    return mask.narrow(-3, sum(heads[:rank]), heads[rank]) if shape.heads else mask
