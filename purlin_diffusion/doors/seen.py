"""What is on a model, and around it, that diffusers keeps where only doors look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn

from purlin_diffusion.doors.hooks import PREFIX, REGISTRY

ACCELERATE = "_hf_hook"  # where accelerate keeps what offloads a module


def active_backend() -> str:
    """The attention backend that is set for all models, by `with attention_backend(...)`; one set on a model is on its processors."""
    return str(_AttentionBackendRegistry._active_backend)


def hooks_and_forwards(model: nn.Module) -> Iterator[tuple[bool, Any]]:
    """(whether it is somebody else's hook, the object) for every hook and every forward that was put on a module of `model`."""
    modules = [model]
    while modules:
        held = modules.pop().__dict__
        if ACCELERATE in held:
            yield True, held[ACCELERATE]
        if REGISTRY in held:
            yield from ((True, hook) for name, hook in held[REGISTRY].hooks.items() if not name.startswith(PREFIX))
        if "forward" in held:
            yield False, held["forward"]
        modules += [child for child in held["_modules"].values() if child is not None]


def hook_holders(held: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The dicts behind a module's `__dict__` in which hooks_and_forwards() finds something."""
    return (vars(held[REGISTRY]), held[REGISTRY].hooks) if REGISTRY in held else ()
