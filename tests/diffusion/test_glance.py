"""A watch: it says what state_of() says, after whatever happens to a model; it walks none that stands still, and keeps no weights alive."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from accelerate.hooks import ModelHook as Offload
from accelerate.hooks import add_hook_to_module
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

import purlin_diffusion.glance
from purlin_core._cpu import identities
from purlin_diffusion.glance import Watch
from purlin_diffusion.graph.state import state_of

Change = Callable[[Any], Any]


class Gate:
    """A processor."""

    def __init__(self) -> None:
        self.scale, self.table = 1.5, torch.ones(2)

    def __call__(self) -> None: ...


class OtherGate(Gate): ...


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.far = nn.Parameter(torch.zeros(3, device="meta"))
        self.register_buffer("table", torch.zeros(3))
        self.scaling, self.names, self.lists = {"wood": 1.0}, ["wood"], ([1.0], {"deep": [2.0]})
        self.processor, self.fused, self.scale = Gate(), False, 0.25
        self.plain, self.plains = torch.zeros(2), [torch.zeros(2), {"wood": torch.zeros(2)}]

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class OtherBlock(Block): ...


class Adapter(nn.Module):
    """As LoRA puts one in the place of a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        return self.base(x)


def fresh(number: float) -> float:
    """An object of its own."""
    return float(str(number))


def data(of: Callable[[Any], Any], new: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(m: Any) -> None:
        of(m).data = new(of(m).data)

    return change


def in_place(of: Callable[[Any], Any]) -> Change:
    def change(m: Any) -> None:
        with torch.no_grad():
            of(m).add_(1)

    return change


def rename(items: dict[str, Any], name: str) -> None:
    """Give the last item another key."""
    items[name] = items.popitem()[1]


CHANGES: dict[str, Change] = {
    "a module inserted": lambda m: m[0].__setattr__("inner", Adapter(nn.Linear(3, 3))),
    "a module wrapped": lambda m: m.__setitem__(2, Adapter(m[2])),
    "a module added": lambda m: m.append(nn.ReLU()),
    "a module taken away": lambda m: m.__delitem__(1),
    "a child renamed": lambda m: rename(m[0]._modules, "outer"),
    "a parameter replaced": lambda m: setattr(m[0].inner if hasattr(m[0], "inner") else m[0], "weight", nn.Parameter(torch.zeros(3, 3))),
    "a plain tensor moved": data(lambda m: m[0].plain, torch.clone),
    "a weight moved": data(lambda m: m[2].inner.weight, torch.clone),
    "a weight changed in place": in_place(lambda m: m[0].far),
    "a buffer replaced": lambda m: setattr(m[0], "table", torch.ones(3)),
    "a buffer deleted": lambda m: m[0]._buffers.pop("table"),
    "a buffer reinterpreted": data(lambda m: m[0].table, lambda x: x.view(torch.int32)),
    "cast": lambda m: m.half(),
    "a tensor attribute replaced": lambda m: setattr(m[0], "plain", torch.ones(2)),
    "a tensor in a list moved": data(lambda m: m[0].plains[0], torch.clone),
    "a tensor in a dict moved": data(lambda m: m[0].plains[1]["wood"], torch.clone),
    "an attribute changed": lambda m: setattr(m[0], "fused", True),
    "an attribute added": lambda m: setattr(m[0], "chunks", 2),
    "an attribute deleted": lambda m: delattr(m[0], "scale"),
    "a value in a dict": lambda m: m[0].scaling.update(wood=0.5),
    "a key in a dict": lambda m: m[0].scaling.update(bark=1.0),
    "an item of a list": lambda m: m[0].names.__setitem__(0, "bark"),
    "an item more": lambda m: m[0].names.append("wood"),
    "an item of a list in a tuple": lambda m: m[0].lists[0].__setitem__(0, 3.0),
    "an item of a list in a dict in a tuple": lambda m: m[0].lists[1]["deep"].__setitem__(0, 3.0),
    "a processor swapped": lambda m: setattr(m[0], "processor", Gate()),
    "a processor's attribute": lambda m: setattr(m[0].processor, "scale", 0.5),
    "a processor's attribute added": lambda m: setattr(m[0].processor, "bias", 0.5),
    "a processor's attributes": lambda m: setattr(m[0].processor, "__dict__", {"scale": 7.5}),
    "a processor's tensor moved": data(lambda m: m[0].processor.table, torch.clone),
    "a processor's class": lambda m: setattr(m[0].processor, "__class__", OtherGate),
    "a hook": lambda m: m[1].register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m[2].register_forward_pre_hook(lambda *_: None),
    "a forward replaced": lambda m: setattr(m[1], "forward", lambda x: x),
    "a hook of diffusers": lambda m: HookRegistry.check_if_exists_or_initialize(m[1]).register_hook(ModelHook(), "mine"),
    "a hook of diffusers more": lambda m: m[2]._diffusers_hook.hooks.update(more=ModelHook()),
    "the hooks of diffusers": lambda m: setattr(m[2]._diffusers_hook, "hooks", {}),
    "a hook of accelerate": lambda m: add_hook_to_module(m[1], Offload()),
    "a class": lambda m: setattr(m[0], "__class__", OtherBlock),
    "all attributes": lambda m: setattr(m[0], "__dict__", {**m[0].__dict__, "fused": 3}),
    "training": lambda m: m.train(not m.training),
}  # fmt: skip

SAME: dict[str, Change] = {
    "nothing": lambda m: None,
    "an equal number": lambda m: setattr(m[0], "scale", fresh(getattr(m[0], "scale", 0.25))),
    "an equal number in a dict": lambda m: m[0].scaling.update({key: fresh(x) for key, x in m[0].scaling.items()}),
    "an equal dict": lambda m: setattr(m[0], "scaling", dict(m[0].scaling)),
    "the mode it is in": lambda m: m.train(m.training),
    "gradients": lambda m: m.requires_grad_(False),
    "a weight on the CPU in place": in_place(lambda m: m[0].plain),
    "a hook come and gone": lambda m: m[1].register_forward_hook(lambda *_: None).remove(),
    "an equal dict of children": lambda m: m[0].__dict__.update(_modules=dict(m[0]._modules)),
}


def model() -> Any:
    built = nn.Sequential(Block(), nn.ReLU(), Block()).requires_grad_(False)
    HookRegistry.check_if_exists_or_initialize(built[2]).register_hook(ModelHook(), "theirs")
    return built


def watching(m: nn.Module) -> Watch:
    """A watch that has glanced at a model, which stands still."""
    watch = Watch()
    for _ in range(3):
        watch.state(m)
    return watch


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    m = model()
    watch = watching(m)
    before = watch.state(m)
    CHANGES[name](m)
    assert watch.state(m) == state_of(m) != before


@pytest.mark.parametrize("name", SAME)
def test_what_is_no_change_leaves_the_very_state(name: str) -> None:
    m = model()
    watch = watching(m)
    before = watch.state(m)
    SAME[name](m)
    assert watch.state(m) is before and state_of(m) == before


@pytest.mark.parametrize("seed", range(40))
def test_a_watch_and_a_walk_agree(seed: int) -> None:
    """After each of many changes in any order; one that a model no longer allows is none."""
    rng, m = random.Random(seed), model()
    watch = watching(m)
    for _ in range(60):
        known = watch.state(m)
        for name in rng.choices([*CHANGES, *SAME], k=rng.randint(0, 2)):
            try:
                {**CHANGES, **SAME}[name](m)
            except Exception:
                m = model() if rng.random() < 0.3 else m
        state = state_of(m)
        assert watch.state(m) == state
        assert (watch.state(m) is known) == (state == known)


REPLACED: dict[str, tuple[Callable[[Any, Any], Any], Callable[[int], Any]]] = {
    "an attribute": (lambda m, x: setattr(m[0], "scale", x), fresh),
    "an attribute's name": (lambda m, x: rename(m[0].__dict__, x), lambda i: f"attribute {i:04}"),
    "a value in a dict": (lambda m, x: m[0].scaling.update(wood=x), fresh),
    "a key in a dict": (lambda m, x: rename(m[0].scaling, x), lambda i: f"key {i:04}"),
    "an item of a list": (lambda m, x: m[0].names.__setitem__(0, x), fresh),
    "a dict": (lambda m, x: setattr(m[0], "scaling", x), lambda i: {"wood": i}),
    "a child's name": (lambda m, x: rename(m[0]._modules, x), lambda i: f"child {i:04}"),
    "a hook": (lambda m, x: m[1]._forward_hooks.update({1: x}), lambda i: lambda *_: i),
    "a forward": (lambda m, x: setattr(m[1], "forward", x), lambda i: lambda x: x + i),
    "a hook of diffusers": (lambda m, x: m[2]._diffusers_hook.hooks.update(theirs=x), lambda i: ModelHook()),
    "a processor": (lambda m, x: setattr(m[0], "processor", x), lambda i: Gate()),
    "a processor's class": (lambda m, x: setattr(m[0].processor, "__class__", x), lambda i: type("G", (Gate,), {})),
    "a processor's attribute": (lambda m, x: setattr(m[0].processor, "scale", x), fresh),
    "a class": (lambda m, x: setattr(m[0], "__class__", x), lambda i: type("B", (Block,), {})),
    "a module": (lambda m, x: setattr(m[0], "inner", x), lambda i: nn.Linear(3, 3 + i)),
    "a buffer": (lambda m, x: setattr(m[0], "table", x), lambda i: torch.zeros(3)),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACED)
def test_what_lies_where_something_else_lay_is_another(name: str) -> None:
    """Put some more in the place of an object: one may get the address of the first, an equal of what the state holds."""
    put, make = REPLACED[name]
    m, watch = model(), Watch()
    for i in range(0, 40, 2):
        put(m, make(i))
        watch.state(m), watch.state(m)
        put(m, make(i))
        before = watch.state(m)
        for j in range(1, 2 + i // 2 % 3):
            put(m, make(i + j))
        after = watch.state(m)
        assert after == state_of(m) and (after != before or name == "a buffer")


def test_a_model_that_stands_still_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    watch = watching(m)
    monkeypatch.setattr(purlin_diffusion.glance, "state_of", None)
    for _ in range(5):
        m[1](torch.zeros(3))
        watch.state(m)


def test_a_model_that_always_changes_is_not_glanced_at(monkeypatch: pytest.MonkeyPatch) -> None:
    m, watch = model(), Watch()
    monkeypatch.setattr(purlin_diffusion.glance, "Glance", None)
    for i in range(5):
        m[0].scale = i
        assert watch.state(m) == state_of(m)


def test_another_model_has_another_state() -> None:
    m, other = model(), model()
    watch = watching(m)
    assert watch.state(other) == state_of(other) != watch.state(m)


DROPS: dict[str, tuple[Callable[[Any], Any], Change]] = {
    "a parameter": (lambda m: m[0].inner.weight, lambda m: setattr(m[0].inner, "weight", nn.Parameter(torch.zeros(3, 3)))),
    "a buffer": (lambda m: m[0].table, lambda m: m[0]._buffers.pop("table")),
    "a tensor": (lambda m: m[0].plain, lambda m: delattr(m[0], "plain")),
    "a layer": (lambda m: m[0].inner.weight, lambda m: setattr(m[0], "inner", nn.Identity())),
    "a branch": (lambda m: m[0].inner.weight, lambda m: m.__delitem__(0)),
    "what held a tensor beside": (lambda m: m[0].processor.table, lambda m: m.__delitem__(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPS)
def test_dropped_weights_are_freed_at_once(name: str) -> None:
    """Not at the next call, nor when garbage is collected."""
    find, drop = DROPS[name]
    m = model()
    watch = watching(m)
    kept = ref(find(m))
    gc.disable()
    try:
        drop(m)
        assert kept() is None
    finally:
        gc.enable()
    assert watch.state(m) == state_of(m)


HOLDERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "dict, value": ({1: "a"}, lambda x: x.update({1: "b"})),
    "dict, key": ({1: "a"}, lambda x: x.update({2: x.pop(1)})),
    "dict, order": ({1: "a", 2: "b"}, lambda x: x.update({1: x.pop(1)})),
    "list": (["a"], lambda x: x.__setitem__(0, "b")),
    "tuple": ((), lambda x: None),
    "object, class": (Gate(), lambda x: setattr(x, "__class__", OtherGate)),
    "object, __dict__": (Gate(), lambda x: setattr(x, "__dict__", {})),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLDERS)
def test_identities_are_the_same_bytes_until_something_is_replaced(name: str) -> None:
    holder, change = HOLDERS[name]
    known = identities([holder], b"")
    assert known and identities([holder], known) is known
    change(holder)
    assert (identities([holder], known) is known) == (name == "tuple")
    assert identities([holder, []], known) is not known and identities([], known) == b""
