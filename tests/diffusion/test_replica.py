"""Replicas: a fingerprint that sees what a replica would miss, and weights that are sent once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from purlin_diffusion.doors import Doors, Wanted
from purlin_diffusion.replica import Sent, fingerprint, replicate


class Gate:
    def __init__(self) -> None:
        self.scale = [1.0]

    def __call__(self) -> None: ...


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("table", torch.zeros(3))
        self.scaling = {"wood": 1.0}
        self.processor = Gate()
        self.fused = False
        self.plain = torch.zeros(2)


def model() -> nn.Module:
    return nn.Sequential(Block(), nn.ReLU(), Block())


CHANGES: list[Callable[[Any], Any]] = [
    lambda m: setattr(m[0], "inner", nn.Linear(3, 3)),
    lambda m: setattr(m[2].inner, "weight", nn.Parameter(torch.zeros(3, 3))),
    lambda m: setattr(m[0], "table", torch.ones(3)),
    lambda m: m[0].scaling.update(wood=0.5),
    lambda m: m[0].scaling.update(bark=1.0),
    lambda m: m[2].processor.scale.__setitem__(0, 0.5) or setattr(m[2].processor, "scale", [0.5]),
    lambda m: setattr(m[0], "processor", Gate()),
    lambda m: setattr(m[0], "fused", True),
    lambda m: setattr(m[0], "plain", torch.ones(2)),
    lambda m: m.train(False),
    lambda m: m.append(nn.ReLU()),
    lambda m: m[1].register_forward_hook(lambda *_: None),
    lambda m: m[0].inner.register_forward_pre_hook(lambda *_: None),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_fingerprint_sees_what_a_replica_would_miss(change: Callable[[Any], Any]) -> None:
    original = model()
    before = fingerprint(original)
    assert fingerprint(original) == before
    change(original)
    assert fingerprint(original) != before


def test_doors_do_not_show_in_a_fingerprint(tiny: Callable[..., Any]) -> None:
    from purlin_diffusion import parallelize

    plain = tiny("sd3").model
    before = fingerprint(plain)
    handle = parallelize(plain, devices=2)
    assert fingerprint(plain) == before
    handle.undo()


def test_weights_are_shared_on_one_device_and_sent_once_to_another() -> None:
    original, cpu = model(), torch.device("cpu")
    doors = Doors(original, Wanted())
    near = replicate(doors, Sent(cpu, cpu))
    assert [id(x) for x in near.parameters()] == [id(x) for x in original.parameters()]
    assert near[0] is not original[0] and near[0].plain is original[0].plain

    sent = Sent(cpu, torch.device("meta"))
    far = replicate(doors, sent)
    assert all(x.device.type == "meta" and isinstance(x, nn.Parameter) for x in far.parameters())
    assert {x.device.type for x in (far[0].table, far[0].plain)} == {"meta"}
    original[2].inner = nn.Linear(3, 3)
    again = replicate(doors, sent)
    assert again[0].inner.weight is far[0].inner.weight and again[2].inner.weight is not far[2].inner.weight
    doors.close()
