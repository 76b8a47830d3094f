"""gather_kv: queries stay, one exchange brings all keys and values to every rank, in the order one GPU has."""

from __future__ import annotations

from torch import Tensor

from purlin_diffusion.attention.mask import Extent, mask_shape, my_rows
from purlin_diffusion.attention.task import Task
from purlin_diffusion.compiled import exchange


def gather_kv(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, task: Task) -> Tensor:
    """Attention of this rank's queries over all keys. Bytes sent a rank: (ranks - 1) x its k and v."""
    here, there = task.keys.text(cut=True), task.keys.text(cut=False)
    specs = [f"b {here} h {width} -> b {there} h {width}" for width in ("d", "e")]
    tensors = [k, v]
    shape = None
    if mask is not None:
        shape = mask_shape(mask, form=task.form, batch=q.shape[0], queries=task.queries, keys=task.keys)
        if shape.keys is Extent.MINE:
            tensors.append(mask)
            specs.append(shape.spec(task.queries, task.keys, mask.ndim, split_heads=False))
    k, v, *moved = exchange(task.carrier, tensors, specs, task.keys.sizes())
    if mask is not None and shape is not None:
        mask = my_rows(moved[0] if moved else mask, shape, task.queries)
    return task.attend(q, k, v, mask)
