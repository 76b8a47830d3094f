"""The state of a model at every root call, by a glance where nothing was replaced.

state_of() walks all of a model in Python: milliseconds, which a replayed call has no time for. A glance walks nothing. It goes over the flat list of
dicts, lists and objects that the walk looks into, and compares what they hold by identity, and of each tensor where it lies, its type and version.
Equal glances mean an equal state. Unequal ones mean that something was replaced, by its equal perhaps: then the state is taken anew, by value.

An identity is only good while its object lives. So what is immutable or looked into is held until the next root call, but tensors and modules never
are: when one of them dies the glance goes at once, and all that it held with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter, methodcaller
from typing import Any, TypeAlias
from weakref import ref

from torch import Tensor, nn

from purlin_core._cpu import identities
from purlin_diffusion.doors.seen import hook_holders
from purlin_diffusion.graph.state import ModelState, state_of
from purlin_diffusion.replica import DEPTH, MODULE_KEYS, PLAIN, has_attributes, is_versioned

Died: TypeAlias = Callable[[Any], None]

_TREES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_ADDRESS, _DTYPE, _VERSION = methodcaller("data_ptr"), attrgetter("dtype"), attrgetter("_version")


class Watch:
    """Remembers the last state of one model."""

    def __init__(self) -> None:
        self._glance: Glance | None = None
        self._state: tuple[ModelState, str] | None = None
        self._stood = False  # was the state, when it was last taken, as it had been before?

    def state(self, model: nn.Module) -> tuple[ModelState, str]:
        """What state_of() returns: the very same object as long as it is equal."""
        known = self._state
        if known is None or self._glance is None or not self._glance.holds(model):
            self._glance = None
            return self._anew(model)
        return known

    def _anew(self, model: nn.Module) -> tuple[ModelState, str]:
        # A glance first: what changes from here on is seen the next time. None of a model that changes at every call.
        glance = Glance(model, self._drop) if self._stood else None
        state = state_of(model)
        self._stood = state == self._state
        if self._state is None or not self._stood:
            self._state = state
        self._glance = glance
        return self._state

    def _drop(self, _: Any) -> None:
        self._glance = None


class Glance:
    """All that state_of(model) depends on, as it was, but for types, which a state holds. `died` is told of a tensor or module of it that dies."""

    def __init__(self, model: nn.Module, died: Died) -> None:
        self._root, self._died = ref(model), died
        self._holders: list[Any] = []
        self._kept: list[Any] = []
        self._tensors: list[ref[Tensor]] = []
        self._versioned: list[ref[Tensor]] = []
        self._enter(model)
        self._identities = identities(self._holders, b"")
        self._facts = self._read()

    def holds(self, model: nn.Module) -> bool:
        """Whether all is as it was."""
        same = self._root() is model and identities(self._holders, self._identities) is self._identities
        return same and self._read() == self._facts

    def _read(self) -> tuple[list[int], list[Any], list[int]]:
        tensors: list[Any] = [x() for x in self._tensors]
        versioned: list[Any] = [x() for x in self._versioned]
        return list(map(_ADDRESS, tensors)), list(map(_DTYPE, tensors)), list(map(_VERSION, versioned))

    def _enter(self, model: nn.Module) -> None:
        modules = [model]
        while modules:
            module = modules.pop()
            held = module.__dict__
            trees, hooks = [held[name] for name in _TREES], hook_holders(held)
            self._holders += (ref(module, self._died), held, *trees, *hooks)
            for items in filter(None, (*trees, *hooks)):
                self._keep(items, 0)
            self._keep({key: value for key, value in held.items() if key not in MODULE_KEYS}, DEPTH)
            modules += [child for child in held["_modules"].values() if child is not None]

    def _keep(self, items: Mapping[Any, Any], depth: int) -> None:
        """Hold keys and values of a dict, and look into the values `depth` deep, as a fingerprint does."""
        self._kept += items
        for value in items.values():
            self._keep_value(value, depth)

    def _keep_value(self, value: Any, depth: int) -> None:
        if isinstance(value, PLAIN):
            self._kept.append(value)
        elif isinstance(value, Tensor):
            self._keep_tensor(value)
        elif not isinstance(value, nn.Module):
            self._kept.append(value)
            if depth > 0:
                self._look_into(value, depth - 1)

    def _keep_tensor(self, x: Tensor) -> None:
        weak = ref(x, self._died)
        self._tensors.append(weak)
        if is_versioned(x):
            self._versioned.append(weak)

    def _look_into(self, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            self._holders.append(value)
            self._keep(value, depth)
        elif isinstance(value, (list, tuple)):
            self._holders.append(value)
            for item in value:
                self._keep_value(item, depth)
        elif has_attributes(value):
            self._holders += (value, vars(value))
            self._keep(vars(value), 0)
