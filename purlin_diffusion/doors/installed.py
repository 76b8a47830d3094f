"""The doors of one model: opened, found again, lifted for a copy, closed."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from diffusers.hooks import ModelHook
from torch import nn

from purlin_diffusion.doors import hooks
from purlin_diffusion.doors.funnels import close_registry, open_registry, wrap_entries
from purlin_diffusion.doors.processors import SITE, Site, displace, make_plain, place
from purlin_diffusion.paths import modules_at

DEEPCOPY = "__deepcopy__"
BLOCKS = "_repeated_blocks"  # which classes compile_repeated_blocks() compiles; diffusers names none for many a model
# What doors, and hooks at large, put on modules.
ATTRIBUTES = frozenset({"forward", hooks.REGISTRY, SITE, DEEPCOPY, BLOCKS})


@dataclass(frozen=True)
class Wanted:
    """What to open: changes of inputs and outputs by path, attention sites by path, and what stands around the root's forward.

    `blocks`: the classes that repeat, for a model of which diffusers does not know them.
    """

    inputs: Mapping[str, hooks.ChangeInputs] = field(default_factory=dict)
    outputs: Mapping[str, hooks.ChangeOutput] = field(default_factory=dict)
    sites: Mapping[str, Site] = field(default_factory=dict)
    around: hooks.Around | None = None
    blocks: tuple[str, ...] = ()


class Doors:
    """Open from construction until close()."""

    def __init__(self, model: nn.Module, wanted: Wanted) -> None:
        self._model, self._wanted = model, wanted
        self._hooked: dict[tuple[str, str], nn.Module] = {}  # (hook, path) -> the module it is on
        self._sited: dict[str, nn.Module] = {}
        self._processors: weakref.WeakSet[Any] = weakref.WeakSet()
        open_registry()
        self._leave_registry = weakref.finalize(
            self, close_registry
        )  # also for a model that is dropped without close()
        try:
            if wanted.around is not None:
                hooks.put_on(model, hooks.AroundHook(wanted.around), hooks.ROOT)
                model.__dict__[DEEPCOPY] = functools.partial(_plain_copy, self)
                if wanted.blocks and not getattr(model, BLOCKS, None):
                    model.__dict__[BLOCKS] = list(wanted.blocks)
            self.anchor()
        except BaseException:
            self.close()
            raise

    def anchor(self) -> None:
        """Find every planned module and processor by its path, and hook those that were replaced since the last time."""
        wrap_entries()
        inputs = self._anchor_hooks(hooks.INPUTS, self._wanted.inputs, hooks.InputsHook)
        outputs = self._anchor_hooks(hooks.OUTPUTS, self._wanted.outputs, hooks.OutputsHook)
        if inputs or outputs:
            hooks.forget_children(self._model)
        self._anchor_sites()

    def _anchor_hooks(self, name: str, wanted: Mapping[str, Any], make: Callable[[Any], ModelHook]) -> bool:
        there: dict[tuple[str, str], tuple[nn.Module, list[Any]]] = {}
        first_at: dict[int, str] = {}  # several paths may meet at a module, which may have several names
        for path, change in wanted.items():
            for at, module in modules_at(self._model, path):
                changes = there.setdefault((name, first_at.setdefault(id(module), at)), (module, []))[1]
                if change not in changes:
                    changes.append(change)
        stale = [
            key for key, module in self._hooked.items() if key[0] == name and there.get(key, (None,))[0] is not module
        ]
        for key in stale:
            hooks.take_off(self._hooked.pop(key), name)
        new = there.keys() - self._hooked.keys()
        for key in new:
            module, changes = there[key]
            hooks.put_on(module, make(functools.partial(_in_turn, changes)), name)
            self._hooked[key] = module
        return bool(stale or new)

    def _anchor_sites(self) -> None:
        there = {
            at: (module, site)
            for path, site in self._wanted.sites.items()
            for at, module in modules_at(self._model, path)
        }
        for at, module in self._sited.items():
            if there.get(at, (None,))[0] is not module:
                displace(module)
        for module, site in there.values():
            self._processors.add(place(module, site))
        self._sited = {at: module for at, (module, _) in there.items()}

    def close(self) -> None:
        """Take every door off; the model is as it was. Does nothing the second time."""
        for name in (DEEPCOPY, BLOCKS):
            self._model.__dict__.pop(name, None)
        hooks.take_off(self._model, hooks.ROOT)
        for (name, _), module in self._hooked.items():
            hooks.take_off(module, name)
        for module in self._sited.values():
            displace(module)
        for processor in (*self._processors, *(getattr(module, "processor", None) for module in self._sited.values())):
            make_plain(processor)
        hooks.forget_children(self._model)
        self._hooked, self._sited = {}, {}
        self._processors.clear()
        self._leave_registry()

    @contextmanager
    def lifted(self) -> Iterator[nn.Module]:
        """The model without its doors for a while, to be copied: diffusers' hooks close over the module they were put on."""
        with ExitStack() as back:
            for module in {
                id(module): module for module in (self._model, *self._hooked.values(), *self._sited.values())
            }.values():
                back.callback(module.__dict__.update, dict(module.__dict__))
                _lift(module)
            for processor in self._processors:
                if (sharded := make_plain(processor)) is not None:
                    back.callback(setattr, processor, "__class__", sharded)
            yield self._model


def _in_turn(changes: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    for change in changes:
        value = change(value)
    return value


def _lift(module: nn.Module) -> None:
    displace(module)
    module.__dict__.pop(DEEPCOPY, None)
    if (below := hooks.innermost_forward(module)) is not None:
        del module.__dict__[hooks.REGISTRY], module.__dict__["forward"]
        if not hooks.is_class_forward(module, below):
            module.__dict__["forward"] = below


def _plain_copy(doors: Doors, memo: dict[int, Any]) -> nn.Module:
    """deepcopy of a parallelized model: a plain one with the same weights. Python's own copy would run the original's."""
    with doors.lifted() as model:
        return copy.deepcopy(model, memo)
