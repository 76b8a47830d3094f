"""What compiled code of a denoiser reads and calls of ours, so that one graph serves all blocks, all calls and all sizes.

torch.compile takes Python numbers that hang on a module for constants: graphs would be made again whenever a length changed. So what a forward
needs is found through the thread that runs it, lengths are the extents of tensors without bytes (segments.py), which become symbols as those of any
input do, and an exchange is an operator that knows no carrier: whichever runs the forward carries it. Its outputs are new tensors each time, so
nothing a peer writes is ever read by another call. In CUDA graphs that torch makes (mode="reduce-overhead") it is captured like any kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from purlin_core.errors import ClosedError
from purlin_core.ops import fake_outputs, flatten, unflatten
from purlin_core.spec import Sizes
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.segments import Division


@dataclass(frozen=True)
class Sharding:
    """Who shares the tokens, how they are divided in this forward, and by which mode they meet."""

    carrier: Carrier
    division: Division
    mode: str


# Compiled code finds things by its module or by a global, and of globals only a thread's own is right for ranks that are threads. Without a class of
# ours: where a class has a default, dynamo (2.11) takes it for what the thread has.
_HERE = threading.local()

_library = torch.library.Library("purlin_diffusion", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "exchange(Tensor[] tensors, str[] specs, str[] names, SymInt[] sizes, int rank, int ranks) -> Tensor[]"
)


@contextmanager
def running(sharding: Sharding) -> Iterator[None]:
    """For a forward on this thread."""
    before = getattr(_HERE, "sharding", None)
    _HERE.sharding = sharding
    try:
        yield
    finally:
        _HERE.sharding = before


def current(own: Sharding) -> Sharding:
    """`own`, in code that may be compiled: then read through the thread, and not through the module that brought it."""
    if not torch.compiler.is_dynamo_compiling():
        return own
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


def _exchange(
    tensors: list[Tensor], specs: list[str], names: list[str], sizes: list[int], rank: int, ranks: int
) -> list[Tensor]:
    sharding: Sharding | None = getattr(_HERE, "sharding", None)
    if sharding is None:
        raise ClosedError("exchange: a graph compiled under parallelize runs outside of its model. Call the model.")
    return sharding.carrier.exchange(tensors, specs, sizes=unflatten(names, sizes))


def _fake_exchange(
    tensors: list[Tensor], specs: list[str], names: list[str], sizes: list[int], rank: int, ranks: int
) -> list[Tensor]:
    return fake_outputs(tensors, specs, unflatten(names, sizes), rank=rank, ranks=ranks)


_library.impl("exchange", _exchange, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("purlin_diffusion::exchange", _fake_exchange, lib=_library)
