"""Plan paths: `transformer_blocks.*.attn` is every block's attn; a last `?` says that a model may have none."""

from __future__ import annotations

from torch import nn


def modules_at(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The modules at `path` with their full names, in order; none where the model has no such path."""
    found = [("", model)]
    for step in path.removesuffix("?").split("."):
        found = [
            (f"{name}.{key}" if name else key, child)
            for name, module in found
            for key, child in _children(module, step)
        ]
    return found


def _children(module: nn.Module, step: str) -> list[tuple[str, nn.Module]]:
    if step == "*":
        return [(key, child) for key, child in module._modules.items() if child is not None]
    child = module._modules.get(step)
    return [] if child is None else [(step, child)]
