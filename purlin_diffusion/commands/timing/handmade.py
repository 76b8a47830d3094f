"""A rival under a CUDA graph, made by hand as anybody could: no library makes it for them, and without it they would be timed by their host's cost.

The first call of a shape runs, the second is recorded and replayed, later ones are replayed: as ours, with the same recorder.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from purlin_diffusion.graph.cuda import CudaPool
from purlin_diffusion.graph.key import key_of
from purlin_diffusion.graph.recorder import MakePool
from purlin_diffusion.graph.take import Take

FORWARD = "forward"


class Graphed:
    """In the place of a model's forward, which pipelines call by keywords."""

    def __init__(self, forward: Any, pool: Any) -> None:
        self._below, self._pool = forward, pool
        self._ran: set[Hashable] = set()
        self._takes: dict[Hashable, Take] = {}
        self.replays = 0

    @property
    def captures(self) -> int:
        return len(self._takes)

    def __call__(self, **arguments: Any) -> Any:
        call = key_of(arguments, (), "").call
        if call not in self._ran:
            self._ran.add(call)
            return self._below(**arguments)
        if call not in self._takes:
            take = Take(self._pool)
            self._pool.prepare(None)
            take.record(lambda inputs: self._below(**inputs), arguments)
            self._takes[call] = take
        self.replays += 1
        return self._takes[call].replay(arguments)

    def free(self) -> None:
        if self._takes and self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)  # replays end first
        for take in self._takes.values():
            take.free()
        self._takes.clear()
        self._pool.release()


@contextmanager
def graphed(model: Any, make_pool: MakePool | None = None) -> Iterator[Graphed]:
    """`model` with a forward that is recorded, inside. `make_pool`: a test's, which needs no GPU."""
    held = model.__dict__
    before = held.get(FORWARD)
    mine = Graphed(model.forward, (make_pool or CudaPool)(next(model.parameters()).device))
    held[FORWARD] = mine
    try:
        yield mine
    finally:
        if before is None:
            del held[FORWARD]
        else:
            held[FORWARD] = before
        mine.free()
