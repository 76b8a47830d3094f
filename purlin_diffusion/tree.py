"""Nests of lists, tuples and dicts with tensors in them, as a forward's arguments and outputs are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change` applied to every tensor in it. Containers are new, all else is the same object."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def map_output(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """map_tensors() for what a forward returns: diffusers' outputs are dicts that are dataclasses."""
    if isinstance(value, Mapping) and hasattr(value, "__dataclass_fields__"):
        return type(value)(**{key: map_output(item, change) for key, item in value.items()})
    return map_tensors(value, change)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of `value` with its path, in order; an empty container is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]" if path else str(key))
    elif isinstance(value, (list, tuple)) and value:
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    else:
        yield path, value
