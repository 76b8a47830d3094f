"""What compiled code of a denoiser reads and calls of ours, so that one graph serves all blocks, all calls and all sizes.

torch.compile takes Python numbers that hang on a module for constants: graphs would be made again whenever a length changed. So what a forward
needs is found through the thread that runs it, lengths are the extents of tensors without bytes (segments.py), which become symbols as those of any
input do, and an exchange is an operator that knows no carrier: whichever runs the forward carries it. Its outputs are new tensors each time, so
nothing a peer writes is ever read by another call. In CUDA graphs that torch makes (mode="reduce-overhead") it is captured like any kernel.

An exchange beside other work is two operators: `exchange_beside` starts it and returns a token, `arrived` gives its results. Nobody may write where a
peer still reads, and a compiler gives memory away that is not used any more. So the first is said to write its inputs, whole ones, of which it takes
the heads itself, and the second to read what the first wrote: until then they are kept, and uncopied where nothing else reads them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from purlin_core.errors import ClosedError
from purlin_core.ops import fake_outputs, flatten, unflatten
from purlin_core.spec import Sizes
from purlin_diffusion.beside import Beside, beside_of
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.segments import Division


@dataclass(frozen=True)
class Sharding:
    """Who shares the tokens, how they are divided in this forward, and by which mode they meet."""

    carrier: Carrier
    division: Division
    mode: str


@dataclass(frozen=True)
class Heads:
    """`count` of them from `first` on."""

    first: int
    count: int

    def of(self, x: Tensor, dim: int) -> Tensor:
        return x.narrow(dim, self.first, self.count)

    def times(self, group: int) -> Heads:
        """Of queries, where each head of keys has `group`."""
        return Heads(self.first * group, self.count * group)


# Compiled code finds things by its module or by a global, and of globals only a thread's own is right for ranks that are threads. Without a class of
# ours: where a class has a default, dynamo (2.11) takes it for what the thread has.
_HERE = threading.local()

_library = torch.library.Library("purlin_diffusion", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "exchange(Tensor[] tensors, str[] specs, str[] names, SymInt[] sizes, int rank, int ranks) -> Tensor[]"
)
_library.define(  # type: ignore[no-untyped-call]
    "exchange_beside(Tensor(a!)[] tensors, SymInt first, SymInt heads, str[] specs, str[] names, SymInt[] sizes) -> Tensor"
)
_library.define(  # type: ignore[no-untyped-call]
    "arrived(Tensor token, Tensor[] tensors, SymInt first, SymInt heads, str[] specs, str[] names, SymInt[] sizes, int rank, int ranks,"
    " Tensor[] after) -> Tensor[]"
)


@contextmanager
def running(sharding: Sharding) -> Iterator[None]:
    """For a forward on this thread."""
    before = getattr(_HERE, "sharding", None), getattr(_HERE, "moving", {})
    _HERE.sharding, _HERE.moving = sharding, {}
    try:
        yield
    except BaseException:
        if (beside := beside_of(sharding.carrier)) is not None:
            beside.join()
        raise
    finally:
        _HERE.sharding, _HERE.moving = before


def current(own: Sharding | Callable[[], Sharding]) -> Sharding:
    """`own`, or what it returns, in code that may be compiled: then read through the thread, and not through the module that brought it."""
    if not torch.compiler.is_dynamo_compiling():
        return own if isinstance(own, Sharding) else own()
    sharding: Sharding = _HERE.sharding  # compiled within a root call, therefore there
    return sharding


def exchange(carrier: Carrier, tensors: Sequence[Tensor], specs: Sequence[str], sizes: Sizes) -> list[Tensor]:
    """carrier.exchange(), in code that may be compiled."""
    if not torch.compiler.is_dynamo_compiling():
        return carrier.exchange(tensors, specs, sizes=sizes)
    names, flat = flatten(sizes)
    return list(
        torch.ops.purlin_diffusion.exchange(list(tensors), list(specs), names, flat, carrier.rank, carrier.ranks)
    )


def start(beside: Beside, tensors: Sequence[Tensor], heads: Heads, specs: Sequence[str], sizes: Sizes) -> Any:
    """beside.start() of some heads, in dim 2 of `tensors`, in code that may be compiled. Returns what arrived() takes."""
    if not torch.compiler.is_dynamo_compiling():
        return beside.start([heads.of(x, 2) for x in tensors], specs, sizes=sizes)
    names, flat = flatten(sizes)
    ops = torch.ops.purlin_diffusion
    return ops.exchange_beside(list(tensors), heads.first, heads.count, list(specs), names, flat)


def arrived(
    beside: Beside,
    moving: Any,
    tensors: Sequence[Tensor],
    heads: Heads,
    specs: Sequence[str],
    sizes: Sizes,
    *,
    after: Sequence[Tensor],
) -> list[Tensor]:
    """beside.arrived(moving), in code that may be compiled; behind every start() before it, and what made `after`. The rest is as start() had it."""
    if not torch.compiler.is_dynamo_compiling():
        return beside.arrived(moving)
    names, flat = flatten(sizes)
    mine = [list(tensors), heads.first, heads.count, list(specs), names, flat, beside.rank, beside.ranks]
    return list(torch.ops.purlin_diffusion.arrived(moving, *mine, list(after)))


def _carrier() -> Carrier:
    """Of the forward that runs on this thread."""
    sharding: Sharding | None = getattr(_HERE, "sharding", None)
    if sharding is None:
        raise ClosedError("exchange: a graph compiled under parallelize runs outside of its model. Call the model.")
    return sharding.carrier


def _beside() -> Beside:
    beside = beside_of(_carrier())
    assert beside is not None, "dynamo's guards: it was one when this was compiled"
    return beside


def _exchange(
    tensors: list[Tensor], specs: list[str], names: list[str], sizes: list[int], rank: int, ranks: int
) -> list[Tensor]:
    return _carrier().exchange(tensors, specs, sizes=unflatten(names, sizes))


def _exchange_beside(
    tensors: list[Tensor], first: int, heads: int, specs: list[str], names: list[str], sizes: list[int]
) -> Tensor:
    moving = start(_beside(), tensors, Heads(first, heads), specs, unflatten(names, sizes))
    token = tensors[0].new_empty(1)
    _HERE.moving[token.data_ptr()] = moving  # its own while it lives, until arrived() has read it
    return token


def _arrived(token: Tensor, *_: Any) -> list[Tensor]:
    return _beside().arrived(_HERE.moving.pop(token.data_ptr()))


def _fake_exchange(
    tensors: list[Tensor], specs: list[str], names: list[str], sizes: list[int], rank: int, ranks: int
) -> list[Tensor]:
    return fake_outputs(tensors, specs, unflatten(names, sizes), rank=rank, ranks=ranks)


def _fake_exchange_beside(tensors: list[Tensor], *_: Any) -> Tensor:
    return tensors[0].new_empty(1)


def _fake_arrived(
    token: Tensor,
    tensors: list[Tensor],
    first: int,
    heads: int,
    specs: list[str],
    names: list[str],
    sizes: list[int],
    rank: int,
    ranks: int,
    after: list[Tensor],
) -> list[Tensor]:
    return _fake_exchange([Heads(first, heads).of(x, 2) for x in tensors], specs, names, sizes, rank, ranks)


for _name, _run, _fake in (
    ("exchange", _exchange, _fake_exchange),
    ("exchange_beside", _exchange_beside, _fake_exchange_beside),
    ("arrived", _arrived, _fake_arrived),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"purlin_diffusion::{_name}", _fake, lib=_library)
