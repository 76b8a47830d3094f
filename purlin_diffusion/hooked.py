"""Hooks of diffusers and accelerate on a parallel model that are not ours: caches, layerwise casting, offloads. What ranks can do with them.

A hook holds the module that it was put on: in a replica it would run the original's. Only the model itself may have some, put on after ours: they
stand around all ranks. Processes have hooks of their own, and go on alike where those go by the step; one that looks at tokens sees its rank's alone.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from purlin_diffusion.doors import foreign_hooks
from purlin_diffusion.errors import PlacementError
from purlin_diffusion.inputs import HOOKS

PROCESSES = "one process a rank (purlin_diffusion.launch, torchrun)"
LOOK_AT_TOKENS = ("fbc_", "sea_cache_")  # FirstBlockCache and SeaCache skip blocks when what went in has changed little


def refuse_before_replicas(model: nn.Module) -> None:
    """Raise PlacementError when replicas of `model` shall be made for the first time, and it has such hooks."""
    if names := _modules(model, foreign_hooks(model)):
        raise PlacementError(
            f"parallelize: modules carry hooks that a replica cannot copy (a cache, an offload, layerwise casting): {names}."
            f" Disable them first, or start {PROCESSES}."
        )


def refuse_for_replicas(model: nn.Module, *, anew: bool) -> None:
    """Raise PlacementError when `model`, which has replicas, has got such hooks. `anew`: they have to be made anew, so its own count too."""
    hooks = [(module, hook) for module, hook in foreign_hooks(model) if module or anew]
    if names := _modules(model, hooks):
        kinds = ", ".join(sorted({hook for _, hook in hooks})[:3])
        raise PlacementError(
            f"{type(model).__name__}.forward: since parallelize, modules have got hooks that a replica cannot copy ({kinds}): {names}."
            f" Take them off (disable_cache() does for a cache), or undo() and start {PROCESSES}."
        )


def refuse_for_processes(model: nn.Module) -> None:
    """Raise PlacementError for a hook by which ranks, which see different tokens, would not go on alike."""
    hooks = [(module, hook) for module, hook in foreign_hooks(model) if hook.startswith(LOOK_AT_TOKENS)]
    if names := _modules(model, hooks):
        raise PlacementError(
            f"{type(model).__name__}.forward: a cache decides by what it sees whether to skip blocks ({hooks[0][1]}), and each rank sees"
            f" tokens of its own: {names}. Call disable_cache(); caches that go by the step (PyramidAttentionBroadcastConfig, MagCacheConfig,"
            " TaylorSeerCacheConfig) can be enabled on every rank."
        )


def hooks_in_words(model: nn.Module) -> str:
    """What must be alike on all ranks that are processes: which hooks there are, and how many, below the model itself. Empty where there are none."""
    counts = Counter(hook for module, hook in foreign_hooks(model) if module)
    return HOOKS + ", ".join(f"{count} {hook}" for hook, count in sorted(counts.items())) if counts else ""


def _modules(model: nn.Module, hooks: list[tuple[str, str]]) -> str:
    names = list(dict.fromkeys(module or type(model).__name__ for module, _ in hooks))
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
