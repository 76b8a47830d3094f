"""Hooks on modules, through diffusers' ModelHook and HookRegistry."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

from purlin_diffusion.compiler import compiled_by, paused, paused_compiler

PREFIX = "purlin_"
ROOT, INPUTS, OUTPUTS = (PREFIX + kind for kind in ("root", "inputs", "outputs"))
REGISTRY = "_diffusers_hook"  # where diffusers keeps a module's registry

# Gets the forward below, args and kwargs; returns the output.
Around: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# Gets the arguments of a call by name, and returns them changed.
ChangeInputs: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
ChangeOutput: TypeAlias = Callable[[Any], Any]


class InputsHook(ModelHook):
    """Changes the arguments of a module's forward."""

    def __init__(self, change: ChangeInputs) -> None:
        super().__init__()
        self.change = change

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        placed = self.names[: len(args)]
        changed = self.change({**dict(zip(placed, args, strict=True)), **kwargs})
        return tuple(changed.pop(name) for name in placed), changed


class OutputsHook(ModelHook):
    """Changes what a module's forward returns."""

    def __init__(self, change: ChangeOutput) -> None:
        super().__init__()
        self.change = change

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return self.change(output)


class AroundHook(ModelHook):
    """Stands around a module's forward and decides whether, where and with what it runs."""

    def __init__(self, around: Around) -> None:
        super().__init__()
        self.around = around

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return paused(self.enter, *args, **kwargs)

    def enter(self, *args: Any, **kwargs: Any) -> Any:
        """A root call. Whatever compiles the model compiles what lies below, see compiler.py."""
        return self.around(compiled_by(paused_compiler(), self.fn_ref.original_forward), args, kwargs)


def put_on(module: nn.Module, hook: ModelHook, name: str) -> None:
    """Register `hook` on `module` under `name`, outside the hooks it has."""
    ours = REGISTRY not in module.__dict__
    registry = HookRegistry.check_if_exists_or_initialize(module)
    if ours:
        registry._purlin_made = True
    registry.register_hook(hook, name)
    if isinstance(hook, AroundHook):  # past diffusers' own frame, which torch.compile would trace
        module.forward = functools.update_wrapper(functools.partial(paused, hook.enter), module.forward)


def take_off(module: nn.Module, name: str) -> None:
    """HookRegistry.remove_hook, but for two things: a hook above ours keeps its own new_forward, and nothing of ours stays in the module."""
    registry = module.__dict__.get(REGISTRY)
    if registry is None or name not in registry.hooks:
        return
    index = registry._hook_order.index(name)
    below = _below(registry, index)
    above = registry._fn_refs[index + 1] if index + 1 < len(registry._fn_refs) else None
    around = above.forward if above is not None and above.original_forward is not None else None
    registry.remove_hook(name, recurse=False)
    if above is not None and around is not None:
        above.forward, above.original_forward = around, below
    if not registry.hooks:
        if is_class_forward(module, module.__dict__.get("forward")):
            del module.__dict__["forward"]
        if getattr(registry, "_purlin_made", False):
            del module.__dict__[REGISTRY]


def forget_children(model: nn.Module) -> None:
    """Let diffusers look anew for the registries below `model`, after hooks came or went."""
    registry = model.__dict__.get(REGISTRY)
    if registry is not None:
        registry.invalidate_child_registries_cache()


def innermost_forward(module: nn.Module) -> Any:
    """The forward below all hooks of a module, all of them ours; None when it has none or others'."""
    registry = module.__dict__.get(REGISTRY)
    if registry is None or not registry.hooks or not all(name.startswith(PREFIX) for name in registry.hooks):
        return None
    return _below(registry, 0)


def is_class_forward(module: nn.Module, forward: Any) -> bool:
    """Whether `forward` is what the module's class defines, bound to the module."""
    return getattr(forward, "__func__", None) is type(module).forward and getattr(forward, "__self__", None) is module


def is_hooked(model: nn.Module) -> bool:
    """Whether `model` is parallel: our root hook is on it."""
    registry = model.__dict__.get(REGISTRY)
    return registry is not None and ROOT in registry.hooks


def runs_diffusers_parallelism(model: nn.Module) -> bool:
    """Whether enable_parallelism was called on `model`."""
    return getattr(model, "_parallel_config", None) is not None


def foreign_hooks(model: nn.Module) -> list[tuple[str, str]]:
    """(module, hook), by their names, for each hook of diffusers or accelerate that is not ours; the model itself has the name ''."""
    found = []
    for name, module in model.named_modules():
        registry = module.__dict__.get(REGISTRY)
        if registry is not None:
            found += [(name, hook) for hook in registry.hooks if not hook.startswith(PREFIX)]
        if hasattr(module, "_hf_hook"):
            found.append((name, type(module._hf_hook).__name__))
    return found


def _below(registry: Any, index: int) -> Any:
    ours = registry._fn_refs[index]
    return ours.forward if ours.original_forward is None else ours.original_forward
