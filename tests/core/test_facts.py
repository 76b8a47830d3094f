"""What of tensors decides on a plan, and where they lie: asked natively and by name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from purlin_core import facts
from purlin_core.facts import facts_of, told_by_name
from purlin_core.memory import address_of

BASE = torch.arange(48, dtype=torch.float32).view(4, 12)
TOLD = [
    BASE,
    BASE.clone(),
    BASE[1:],
    BASE.T,
    BASE[:, ::2],
    BASE[0].expand(4, 12),
    BASE.view(4, 3, 4),
    BASE.view(48),
    BASE.view(1, 48),
    BASE[0, 0],
    *[torch.zeros(4, 12).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.int32, torch.bool)],
    torch.zeros(4, 12, dtype=torch.float8_e4m3fn),
    torch.zeros(4, 12, dtype=torch.float8_e5m2),
]
BY_NAME = {
    "no elements": lambda: torch.zeros(0, 3),
    "meta": lambda: torch.zeros(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "bytes": lambda: torch.zeros(3, dtype=torch.uint8),
    "fewer bits than a byte": lambda: torch.zeros(3, dtype=torch.int8).view(getattr(torch, "int4", torch.int8)),
    "complex": lambda: torch.zeros(4, 6, dtype=torch.complex64),
    "lazy conjugate": lambda: torch.zeros(4, 6, dtype=torch.complex64).conj(),
    "lazy negative": lambda: torch.zeros(4, 6, dtype=torch.complex64).conj().imag,
    "many dims": lambda: torch.zeros([1] * 9),
    "a subclass": lambda: torch.nn.Parameter(torch.zeros(3), requires_grad=False),
    "requires grad": lambda: torch.zeros(3, requires_grad=True),
}


def test_native_facts_are_equal_where_those_by_name_are() -> None:
    for a, b in itertools.product(TOLD, repeat=2):
        assert (facts_of([a])[0] == facts_of([b])[0]) is (told_by_name([a])[0] == told_by_name([b])[0])
        pairs = [a, b], [b, a]
        same = [tell(pairs[0])[0] == tell(pairs[1])[0] for tell in (facts_of, told_by_name)]
        assert same[0] is same[1]


@pytest.mark.parametrize("kind", [list, tuple])
def test_addresses_are_where_tensors_begin(kind: Any) -> None:
    for tensors in ([BASE], TOLD, TOLD[:1] * 16, []):
        found, addresses = facts_of(kind(tensors))
        assert isinstance(found, bytes) and addresses == [address_of(x) for x in tensors]


@pytest.mark.parametrize("make", BY_NAME.values(), ids=BY_NAME)
def test_what_is_not_told_natively_is_told_by_name(make: Any) -> None:
    x: Tensor = make()
    for tensors in ([x], [BASE, x]):
        assert facts_of(tensors) == told_by_name(tensors)
    assert facts_of([BASE])[0] not in (facts_of([x])[0], facts_of([BASE, x])[0])


def test_a_tensor_that_requires_grad_is_another_only_where_grad_is_recorded() -> None:
    x = torch.zeros(4, 12, requires_grad=True)
    assert facts_of([x])[0] != facts_of([x.detach()])[0]
    with torch.no_grad():
        assert facts_of([x])[0] == facts_of([x.detach()])[0]


def test_a_torch_without_the_native_way_is_asked_by_name() -> None:
    class Older:
        pass

    assert facts._cpu.Tensors(Older).look([BASE]) is None
    assert facts._cpu.Tensors(Tensor).look(BASE) is None and facts._cpu.Tensors(Tensor).look([3]) is None
