"""Worlds of threads for tests. A small inbox makes few bytes take many chunks, and its packet limit decides the regime: nothing is patched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from purlin_core import Communicator, LocalWorld
from purlin_core.tune import Scratch

T = TypeVar("T")
REGIMES = ("packet", "staged", "direct")
TIMEOUT = 20.0  # seconds; no healthy test comes near it, and none that is broken can hang


def scratch_for(regime: str, *, teams: int = 1, slots: int = 4, slot_bytes: int = 64) -> Scratch:
    """An inbox in which every call that can take `regime` takes it."""
    packets = 1 << 14 if regime == "packet" else 0
    return Scratch(teams, slots, slot_bytes, window_bytes=1 << 14, packet_bytes=packets)


@contextmanager
def world_of(ranks: int, regime: str = "", **arguments: Any) -> Iterator[LocalWorld]:
    """`ranks` threads; with `regime`, in an inbox of scratch_for() and with a heap where outputs are granted."""
    if regime:
        shape = {name: arguments.pop(name) for name in ("teams", "slots", "slot_bytes") if name in arguments}
        arguments.setdefault("scratch", scratch_for(regime, **shape))
        arguments.setdefault("heap_bytes", 1 << 20 if regime == "direct" else 0)
    with LocalWorld(ranks, **{"timeout": TIMEOUT, "setup_timeout": TIMEOUT, **arguments}) as world:
        yield world


def errors_of(world: LocalWorld, fn: Callable[[Communicator], T]) -> list[BaseException | T]:
    """What fn(communicator) raised or returned on each rank; nobody is told of an exception by guard()."""

    def caught(communicator: Communicator) -> BaseException | T:
        try:
            return fn(communicator)
        except Exception as error:
            return error

    return world.run(caught)


def regimes_of(world: LocalWorld) -> set[str]:
    """Every regime that any call took so far."""
    return {name for comm in world.communicators for name, calls in comm.stats().regimes.items() if calls}


def bytes_of(x: Tensor) -> Tensor:
    """The bits of a tensor: NaNs of the same bits are equal, 0.0 and -0.0 are not."""
    flat = x.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Bitwise, but a NaN is a NaN: which payload a sum of NaNs has, IEEE 754 leaves to the machine."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
        return same_bits(a, b)
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and same_bits(a.masked_fill(nan, 0), b.masked_fill(nan, 0))


def spread(x: Tensor, gap: int = 2) -> Tensor:
    """The same values with gaps between them in memory: strides of every dim are `gap` times larger."""
    if x.ndim == 0:
        return x.clone()
    wide = torch.zeros([size * gap for size in x.shape], dtype=x.dtype, device=x.device)
    view = wide[tuple(slice(None, None, gap) for _ in x.shape)]
    view.copy_(x)
    return view


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all, so NaNs with payloads too; bool keeps to 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).to(torch.bool)
    count = dtype.itemsize
    for size in shape:
        count *= size
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).reshape(tuple(shape))


def numbers(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Of many magnitudes, so that another order would give other bits."""
    if not dtype.is_floating_point:
        return random_tensor((size,), dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(size, generator=generator, dtype=torch.float64)
    return (wide * torch.exp2(torch.randint(-6, 6, (size,), generator=generator))).to(dtype)


def lent(comm: Communicator, x: Tensor) -> Tensor:
    """The same values where peers can reach them."""
    return comm.empty(x.shape, x.dtype).copy_(x)


def on_threads(ranks: int, fn: Callable[[int], T]) -> list[T]:
    """fn(rank) on a thread a rank: for ranks that meet through a store."""
    with ThreadPoolExecutor(ranks) as pool:
        return [future.result(timeout=60) for future in [pool.submit(fn, rank) for rank in range(ranks)]]
