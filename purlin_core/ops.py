"""The collectives as torch operators, so that torch.compile and graphs see them. Eager calls do not pass through here."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from purlin_core.errors import ClosedError
from purlin_core.plan import output_shape
from purlin_core.spec import Op, Sizes, Spec

if TYPE_CHECKING:
    from purlin_core.communicator import Communicator

# Operators take numbers and strings only, so a communicator goes by its number, and sizes as a flat list: how many a name has, then they.
_live: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)

_library = torch.library.Library("purlin", "DEF")  # type: ignore[no-untyped-call]
_ARGUMENTS = "int communicator, Tensor[] tensors, str[] specs, str[] names, SymInt[] sizes, str op, str tag"
_library.define(f"exchange({_ARGUMENTS}) -> Tensor[]")  # type: ignore[no-untyped-call]
_library.define(f"exchange_into({_ARGUMENTS}, Tensor(a!)[] out) -> ()")  # type: ignore[no-untyped-call]


def register(communicator: Communicator) -> int:
    number = next(_numbers)
    _live[number] = communicator
    return number


def living() -> list[Communicator]:
    """Every communicator of this process."""
    return list(_live.values())


def exchange(
    communicator: int,
    tensors: Sequence[Tensor],
    specs: str | Sequence[str],
    *,
    sizes: Sizes | None,
    op: Op,
    out: Sequence[Tensor] | None,
    tag: str,
) -> list[Tensor]:
    """Communicator.exchange() as an operator of a compiled graph."""
    texts = [specs] * len(tensors) if isinstance(specs, str) else list(specs)
    names, flat = flatten(sizes)
    if out is None:
        return list(torch.ops.purlin.exchange(communicator, tensors, texts, names, flat, op, tag))
    torch.ops.purlin.exchange_into(communicator, tensors, texts, names, flat, op, tag, out)
    return list(out)


def flatten(sizes: Sizes | None) -> tuple[list[str], list[int]]:
    """Sizes as operators take them: the names, and for each how many numbers it has, 0 for a whole length, and then they."""
    given = sizes or {}
    return list(given), [n for size in given.values() for n in _flatten(size)]


def _flatten(size: Sequence[int] | int) -> list[int]:
    return [0, size] if isinstance(size, int) else [len(size), *size]


def unflatten(names: Sequence[str], flat: Sequence[int]) -> Sizes:
    """flatten() turned back."""
    sizes: dict[str, int | tuple[int, ...]] = {}
    at = 0
    for name in names:
        count = flat[at]
        sizes[name] = flat[at + 1] if count == 0 else tuple(flat[at + 1 : at + 1 + count])
        at += 1 + max(count, 1)
    return sizes


def _communicator(number: int) -> Communicator:
    try:
        return _live[number]
    except KeyError:
        raise ClosedError(
            f"purlin::exchange: communicator {number} is gone; a compiled graph outlived it. Compile again."
        ) from None


def _exchange(
    communicator: int, tensors: list[Tensor], specs: list[str], names: list[str], sizes: list[int], op: Op, tag: str
) -> list[Tensor]:
    given = unflatten(names, sizes)
    return _communicator(communicator).exchange_now(tensors, tuple(specs), sizes=given, op=op, out=None, tag=tag)


def _exchange_into(
    communicator: int,
    tensors: list[Tensor],
    specs: list[str],
    names: list[str],
    sizes: list[int],
    op: Op,
    tag: str,
    out: list[Tensor],
) -> None:
    given = unflatten(names, sizes)
    _communicator(communicator).exchange_now(tensors, tuple(specs), sizes=given, op=op, out=out, tag=tag)


def fake_outputs(
    tensors: Sequence[Tensor], specs: Sequence[str], given: Sizes, *, rank: int, ranks: int
) -> list[Tensor]:
    """Tensors of the shapes and dtypes that an exchange returns, for fake tensors: lengths may be symbols."""
    outs = []
    for x, text in zip(tensors, specs, strict=True):
        spec = Spec.parse(text)
        mine = {name: size for name, size in given.items() if name in spec.left.segments}
        outs.append(x.new_empty(output_shape(spec, x.shape, rank, ranks, mine)))
    return outs


def _fake_exchange(
    communicator: int, tensors: list[Tensor], specs: list[str], names: list[str], sizes: list[int], op: Op, tag: str
) -> list[Tensor]:
    live = _communicator(communicator)
    return fake_outputs(tensors, specs, unflatten(names, sizes), rank=live.rank, ranks=live.ranks)


def _fake_exchange_into(*_: object) -> None:
    return None


_library.impl("exchange", _exchange, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("exchange_into", _exchange_into, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("purlin::exchange", _fake_exchange, lib=_library)
torch.library.register_fake("purlin::exchange_into", _fake_exchange_into, lib=_library)
