"""A recorder that needs no GPU: it runs what was recorded again, on the recorded inputs, and puts what comes out where the recording's lay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from purlin_diffusion import Handle, ParallelConfig
from purlin_diffusion.graph.policy import Graphs
from purlin_diffusion.opening import open_handle
from purlin_diffusion.tree import leaves

T = TypeVar("T")
RECORDING_BYTES = 1000


@dataclass
class EchoPool:
    """`fails` is called before a body is recorded, or `late`, behind it; it may raise. Each recording takes RECORDING_BYTES of `room`.

    An echo runs the body, and so its exchanges: where ranks record each for itself, all have to run it, as they need not on a GPU.
    """

    device: torch.device
    fails: Callable[[], None] = lambda: None
    late: bool = False
    room: int = 10**6
    live: list[EchoRecorder] = field(default_factory=list)
    released: int = 0

    def recorder(self) -> EchoRecorder:
        return EchoRecorder(self)

    def prepare(self, stream: Any) -> None:
        assert stream is None

    def branch(self) -> None:
        return None

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def used_bytes(self) -> int:
        return RECORDING_BYTES * len(self.live)

    @property
    def free_bytes(self) -> int:
        return self.room

    def release(self) -> None:
        assert not self.live
        self.released += 1


class EchoRecorder:
    def __init__(self, pool: EchoPool) -> None:
        self._pool = pool
        self._body: Callable[[], Any] | None = None
        self._outputs: list[Tensor] = []
        self._ran = False
        self.replays = 0

    def record(self, body: Callable[[], T], *, ready: Callable[[], None]) -> T:
        ready()
        if not self._pool.late:
            self._pool.fails()
        result = body()
        if self._pool.late:
            self._pool.fails()
        self._body, self._ran = body, True
        self._outputs = tensors(result)
        self._pool.live.append(self)
        return result

    def replay(self) -> None:
        """The first after record() finds the body's values in place."""
        assert self in self._pool.live and self._body is not None
        self.replays += 1
        if not self._ran:
            for mine, new in zip(self._outputs, tensors(self._body()), strict=True):
                mine.copy_(new)
        self._ran = False

    def free(self) -> None:
        if self in self._pool.live:
            self._pool.live.remove(self)
        self._body = None


def tensors(value: Any) -> list[Tensor]:
    return [x for _, x in leaves(value) if isinstance(x, Tensor)]


@dataclass
class Studio:
    """Opens handles whose graphs are echoes, and holds their pools."""

    pools: list[EchoPool] = field(default_factory=list)
    fails: Callable[[torch.device], None] = lambda _: None
    late: bool = False
    room: int = 10**6

    def graphs(self, config: ParallelConfig, *, apart: bool = False) -> Graphs:
        return Graphs(config, self._pool, apart=apart)

    def open(
        self, pipe_or_model: Any, config: ParallelConfig | None = None, *, apart: bool = False, **where: Any
    ) -> Handle:
        config = config or ParallelConfig(graph=True)
        devices, communicator = where.get("devices"), where.get("communicator")
        return open_handle(pipe_or_model, config, devices, communicator, graphs=self.graphs(config, apart=apart))

    def _pool(self, device: torch.device) -> EchoPool:
        pool = EchoPool(device, fails=lambda: self.fails(device), late=self.late, room=self.room)
        self.pools.append(pool)
        return pool


def done(handle: Handle) -> list[tuple[int, int, int]]:
    """(captures, replays, evictions) of each rank."""
    return [(each.graphs.captures, each.graphs.replays, each.graphs.evictions) for each in handle.counters]


def module_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules()]
