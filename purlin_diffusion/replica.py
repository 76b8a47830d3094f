"""Replicas of a denoiser for the worker threads of one process: modules of their own, weights shared on the CPU and copied to other devices.

A replica follows its original. Before every call the original is fingerprinted: its modules, parameters, and the plain Python attributes of modules
and processors. When anything differs the replica is made anew; weights already copied to a device and unchanged since are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from purlin_diffusion.compiler import OwnCode, compile_alike
from purlin_diffusion.doors import ATTRIBUTES, Doors, plain_class

MODULE_KEYS = frozenset(nn.Module().__dict__) - {"training"}
PLAIN = (bool, int, float, complex, str, bytes, type(None))
DEPTH = 3  # how far attributes are looked into: LoRA keeps scalings in dicts, processors keep lists of them


def fingerprint(model: nn.Module) -> Hashable:
    """Equal as long as a replica of `model` made before is still one. It is taken at every root call, in a microsecond or two a module.

    Plain attributes of torch's own modules are taken as given: what changes there is a module, a parameter, or a hook.
    """
    facts: list[Any] = []
    modules = [model]
    while modules:
        module = modules.pop()
        kind, held = type(module), module.__dict__
        facts.append(kind)
        for tensors in (held["_parameters"], held["_buffers"]):
            facts += [_of_tensor(x) for x in tensors.values() if x is not None]
        if held["_forward_hooks"] or held["_forward_pre_hooks"]:
            facts += map(id, (*held["_forward_hooks"].values(), *held["_forward_pre_hooks"].values()))
        if not kind.__module__.startswith("torch.nn."):
            facts += [
                (key, _of_value(value, DEPTH))
                for key, value in held.items()
                if key not in MODULE_KEYS and key not in ATTRIBUTES
            ]
        children = held["_modules"]
        facts.append(tuple(children))
        modules += [child for child in children.values() if child is not None]
    return tuple(facts)


def is_versioned(x: Tensor) -> bool:
    """Whether a change of its values is one of the model: those on the CPU are shared, so what happens to them happens to the replica's."""
    return not x.is_cpu and not x.is_inference()


def has_attributes(value: Any) -> bool:
    """Whether a fingerprint looks into the attributes of what a module holds, as it does for an attention processor."""
    plain = isinstance(value, (type, FunctionType, MethodType, nn.Module))
    return callable(value) and not plain and hasattr(value, "__dict__")


def replicate(doors: Doors, sent: Sent) -> nn.Module:
    """A copy of the model behind `doors`, as it is without them, with the weights that `sent` holds."""
    with doors.lifted() as model:
        replica: nn.Module = copy.deepcopy(model, memo=sent.memo(model))
        compile_alike(model, replica, sent.own)
    return replica


class Sent:
    """Weights for one replica: the original's own where both live on one device, else copies, of which only those that changed are made again."""

    def __init__(self, here: torch.device, there: torch.device) -> None:
        self._here, self._there = here, there
        self.own = OwnCode()
        self._copies: dict[int, _Copy] = {}

    def memo(self, model: nn.Module) -> dict[int, Any]:
        """What deepcopy shall put in the place of every tensor of `model`."""
        tensors = {id(x): x for x in _tensors(model)}
        moving = {} if self._here == self._there else {key: x for key, x in tensors.items() if x.device == self._here}
        self._copies = {key: self._copy(x) for key, x in moving.items()}
        return {**tensors, **{key: each.copy for key, each in self._copies.items()}}

    def _copy(self, x: Tensor) -> _Copy:
        state = _of_tensor(x)
        known = self._copies.get(id(x))
        if known is not None and known.state == state:
            return known
        moved = x.detach().to(self._there)
        return _Copy(
            state, x, nn.Parameter(moved, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else moved
        )


@dataclass(frozen=True)
class _Copy:
    """`original` is held so that its id, by which it is found, stays its own."""

    state: Hashable
    original: Tensor
    copy: Tensor


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (value for value in module.__dict__.values() if isinstance(value, Tensor))


def _of_tensor(x: Tensor) -> Hashable:
    facts = id(x), x.data_ptr(), x.dtype
    return (*facts, x._version) if is_versioned(x) else facts


def _of_value(value: Any, depth: int) -> Hashable:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if depth > 0:
        if isinstance(value, dict):
            return tuple([(key, _of_value(item, depth - 1)) for key, item in value.items()])
        if isinstance(value, (list, tuple)):
            return tuple([_of_value(item, depth - 1) for item in value])
        if has_attributes(value):
            attributes = tuple([(key, _of_value(item, 0)) for key, item in vars(value).items()])
            return id(value), plain_class(type(value)), attributes  # an attention processor
    return id(value)
