"""gather_kv: queries stay, one exchange brings all keys and values to every rank, in the order one GPU has.

Heads know nothing of each other. So where the carrier can exchange beside other work there are two exchanges, of a quarter of the heads and of all
others, and the second moves while the first heads attend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from purlin_diffusion.attention.mask import Extent, MaskShape, mask_shape, my_rows
from purlin_diffusion.attention.task import Task
from purlin_diffusion.beside import Beside, beside_of
from purlin_diffusion.compiled import Heads, arrived, exchange, start


def gather_kv(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, task: Task) -> Tensor:
    """Attention of this rank's queries over all keys. Bytes sent a rank: (ranks - 1) x its k and v."""
    shape = None
    if mask is not None:
        shape = mask_shape(mask, form=task.form, batch=q.shape[0], queries=task.queries, keys=task.keys)
    beside = beside_of(task.carrier)
    if beside is not None and _go_in_two(k, v, beside.least_bytes, task):
        return _in_two(q, k, v, mask, shape, beside, task)
    tensors, specs = [k, v], _specs(task)
    if mask is not None and shape is not None and shape.keys is Extent.MINE:
        tensors.append(mask)
        specs.append(_mask_spec(mask, shape, task))
    k, v, *moved = exchange(task.carrier, tensors, specs, task.keys.sizes())
    if mask is not None and shape is not None:
        mask = my_rows(moved[0] if moved else mask, shape, task.queries)
    return task.attend(q, k, v, mask)


def _go_in_two(k: Tensor, v: Tensor, least_bytes: int, task: Task) -> bool:
    """The same on every rank: by whole lengths. Those are not looked at without need, for compiled code would be right for some of them only."""
    return k.shape[2] > 1 and (least_bytes == 0 or _moved_bytes(k, v, task) >= least_bytes)


def _moved_bytes(k: Tensor, v: Tensor, task: Task) -> int:
    """Of a rank's sharded keys and values, were shares equal."""
    width = k.shape[3] + v.shape[3]
    return k.shape[0] * task.keys.sharded_total * k.shape[2] * width * k.element_size() // task.keys.ranks


def _in_two(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: MaskShape | None, beside: Beside, task: Task
) -> Tensor:
    """Both exchanges start before one is waited for, queries are there before the first is, and its heads attend before the second is.

    A mask moves before them: it is small.
    """
    if mask is not None and shape is not None:
        mask = _my_mask(mask, shape, task)
    by_head = shape is not None and shape.heads
    parts, group = _parts(k.shape[2]), q.shape[2] // k.shape[2]
    specs, sizes = _specs(task), task.keys.sizes()
    moving = [start(beside, [k, v], part, specs, sizes) for part in parts]
    outs: list[Tensor] = []
    for part, each in zip(parts, moving, strict=True):
        keys, values = arrived(beside, each, [k, v], part, specs, sizes, after=outs or [q])
        queries = part.times(group)
        theirs = queries.of(mask, -3) if mask is not None and by_head else mask
        outs.append(task.attend(queries.of(q, 2), keys, values, theirs))
    return torch.cat(outs, 2)


def _parts(heads: int) -> tuple[Heads, Heads]:
    """The first is waited for, so it is the smaller one; but its heads have to attend for as long as the second moves. At 1024 FLUX.1 attends to a
    quarter of its heads for some 60 us, and all other keys and values move in 75 at 300 GB/s; at 2048 attention has four times as long.
    """
    first = max(1, heads // 4)
    return Heads(0, first), Heads(first, heads - first)


def _my_mask(mask: Tensor, shape: MaskShape, task: Task) -> Tensor:
    """For all keys and this rank's queries."""
    if shape.keys is Extent.MINE:
        mask = exchange(task.carrier, [mask], [_mask_spec(mask, shape, task)], task.keys.sizes())[0]
    return my_rows(mask, shape, task.queries)


def _specs(task: Task) -> list[str]:
    here, there = task.keys.text(cut=True), task.keys.text(cut=False)
    return [f"b {here} h {width} -> b {there} h {width}" for width in ("d", "e")]


def _mask_spec(mask: Tensor, shape: MaskShape, task: Task) -> str:
    return shape.spec(task.queries, task.keys, mask.ndim, split_heads=False)
