"""The Python types of a call's arguments, looked at when a call has failed on them: a call that works does not pay for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from purlin_core.errors import ArgumentTypeError, ShapeError

MOST_ROWS = 1 << 48
MOST_HEAP_BYTES = 1 << 46


def check_types(call: str, tensors: Any, out: Any, specs: Any, sizes: Any, *, op: Any = "sum", tag: Any = "") -> None:
    """Raise ArgumentTypeError for the first argument that is not of its type; do nothing when all are."""
    _check_tensors(call, "tensors", tensors)
    for name, text in (("op", op), ("tag", tag)):
        if not isinstance(text, str):
            raise _wrong(call, name, "a string", text)
    if out is not None:
        _check_tensors(call, "out", out)
    texts = [specs] if isinstance(specs, str) else specs
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise _wrong(call, "spec", "a spec string, or one a tensor", specs)
    if sizes is None:
        return
    if not isinstance(sizes, Mapping):
        raise _wrong(call, "sizes", "a mapping from names to rows", sizes)
    for name, rows in sizes.items():
        counts = rows if isinstance(rows, Sequence) and not isinstance(rows, str) else [rows]
        if not all(isinstance(n, int) and 0 <= n < MOST_ROWS for n in counts):
            raise _wrong(
                call, f"sizes[{name!r}]", f"row counts, integers from 0 to 2**{MOST_ROWS.bit_length() - 1}", rows
            )


def check_sequence(call: str, tensors: Any) -> None:
    """A single tensor is a sequence of its rows to Python, and not to us."""
    if isinstance(tensors, Tensor):
        raise ArgumentTypeError(
            f"{call}: `tensors` needs a list of tensors; got one tensor. Pass [x], or call redistribute."
        )


def check_shares(call: str, shares: Mapping[str, Any]) -> None:
    """Rows for each rank, or None."""
    for name, sizes in shares.items():
        whole = isinstance(sizes, Sequence) and not isinstance(sizes, str) and all(isinstance(n, int) for n in sizes)
        if sizes is not None and not whole:
            raise _wrong(call, name, "a list of integers, rows a rank", sizes)


def check_heap_bytes(call: str, heap_bytes: Any) -> None:
    """Room for granted outputs, in bytes."""
    if not isinstance(heap_bytes, int) or isinstance(heap_bytes, bool):
        raise _wrong(call, "heap_bytes", "an integer", heap_bytes)
    if not 0 <= heap_bytes <= MOST_HEAP_BYTES:
        raise ShapeError(f"{call}: `heap_bytes` needs to be from 0 to 2**46; got {heap_bytes}.")


def check_budget(blocks: Any) -> None:
    """Blocks of a GPU."""
    if not isinstance(blocks, int) or isinstance(blocks, bool):
        raise _wrong("budget", "blocks", "an integer", blocks)
    if blocks < 1:
        raise ShapeError(f"budget: `blocks` needs to be 1 or more; got {blocks}.")


def check_empty(shape: Any, dtype: Any) -> None:
    """Extents, or one of them, and a dtype."""
    extents = (shape,) if isinstance(shape, int) else shape
    if not isinstance(extents, Sequence) or isinstance(extents, str) or not all(isinstance(n, int) for n in extents):
        raise _wrong("empty", "shape", "integers, or one", shape)
    if not isinstance(dtype, torch.dtype):
        raise _wrong("empty", "dtype", "a torch dtype", dtype)


def check_memory(call: str, tensors: Sequence[Tensor], addresses: Sequence[int]) -> None:
    """Tensors with elements lie somewhere: not what only wraps others, nor what has given its storage back."""
    for x, address in zip(tensors, addresses, strict=True):
        if address == 0 and x.numel() > 0:
            raise ArgumentTypeError(
                f"{call}: needs tensors with memory of their own; got a {type(x).__name__} of shape {tuple(x.shape)} that has none."
                " Pass the tensor that it wraps, or one whose storage was not freed."
            )


def check_halo(dim: Any, rows: Any) -> None:
    """`dim` is an integer, `rows` one or two."""
    both = rows if isinstance(rows, tuple) and len(rows) == 2 else (rows,)
    if not all(isinstance(n, int) for n in (dim, *both)):
        raise ArgumentTypeError(
            f"halo: needs `dim` an integer, `rows` one or (before, after); got dim={dim!r}, rows={rows!r}."
        )


def _check_tensors(call: str, name: str, tensors: Any) -> None:
    if not isinstance(tensors, Sequence):
        raise _wrong(call, name, "a list of tensors", tensors)
    for x in tensors:
        if not isinstance(x, Tensor):
            raise _wrong(call, "x" if name == "tensors" and len(tensors) == 1 else name, "torch tensors", x)


def _wrong(call: str, name: str, needed: str, came: Any) -> ArgumentTypeError:
    return ArgumentTypeError(f"{call}: `{name}` needs {needed}; got {came!r:.80} of type {type(came).__name__}.")
