"""The arguments of a denoiser's call, held against its plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from purlin_diffusion.entry import Keys
from purlin_diffusion.errors import ArgumentError
from purlin_diffusion.plan import Plan


def forward_signature(kind: type[nn.Module]) -> inspect.Signature:
    """The signature of a class's forward, `self` left out."""
    return _signature(kind.forward)


@functools.lru_cache(maxsize=256)
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name. Raises ArgumentError when the forward does not take them."""
    signature = forward_signature(type(model))
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise ArgumentError(
            f"{type(model).__name__}.forward: {error}. It takes {', '.join(signature.parameters)}."
        ) from error


def check_arguments(plan: Plan, arguments: Mapping[str, Any]) -> None:
    """Raise ArgumentError for an argument, or a key of a dict argument, that is not None and that the plan refuses or does not know."""
    for name, value in arguments.items():
        if value is None:
            continue
        _check(plan, name, known=name in plan.arguments)
        entry = plan.arguments.get(name)
        if isinstance(entry, Keys) and isinstance(value, Mapping):
            for key, item in value.items():
                if item is not None:
                    _check(plan, f"{name}.{key}", known=key in entry.entries)


def _check(plan: Plan, name: str, *, known: bool) -> None:
    if (refusal := plan.refuse.get(name)) is not None:
        raise ArgumentError(f"{plan.model}.forward: `{name}` cannot be sharded: {refusal}.")
    if not known:
        raise ArgumentError(
            f"{plan.model}.forward: its plan does not know `{name}`, so it may be cut wrongly; it knows {', '.join(plan.forward)}."
            " Leave it out, or register a plan that says what it holds."
        )
