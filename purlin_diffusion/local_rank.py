"""A rank that is a worker thread of this process, and the replica it runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from purlin_diffusion.carrier import Carrier
from purlin_diffusion.plan import Plan
from purlin_diffusion.replica import Sent, replicate
from purlin_diffusion.sharded import ShardedModel
from purlin_diffusion.tree import map_tensors
from purlin_diffusion.workers import Ambience, Worker, intra_op_threads


class LocalRank:
    """A worker thread and its replica."""

    sharded: ShardedModel

    def __init__(self, rank: int, root: torch.device, device: torch.device) -> None:
        self.rank, self.root, self.device = rank, root, device
        self._sent = Sent(root, device)
        self.replace_thread()

    def hold(self, root: ShardedModel, plan: Plan, carrier: Carrier, mode: str) -> None:
        """Take a new replica of the root's model."""
        replica = replicate(root.doors, self._sent)
        before = getattr(self, "sharded", None)
        self.sharded = ShardedModel(replica, plan, carrier, mode, counted=before.counters() if before else None)
        if before is not None:
            before.close()

    def start(self, arguments: Mapping[str, Any], ambience: Ambience, threads: int | None) -> Future[Any]:
        """Begin a forward with `arguments`, whose tensors lie on the root's device. On a GPU its work goes to the stream that is the caller's there,
        behind the copies of the arguments; ranks of one GPU share it, and torch's allocator sees one order."""
        here = map_tensors(dict(arguments), self._fetch)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        return self._worker.run(functools.partial(_forward, self.sharded, here, stream, ambience, threads))

    def replace_thread(self) -> None:
        self._worker = Worker(f"purlin-rank-{self.rank}")

    def close(self) -> None:
        if hasattr(self, "sharded"):
            self.sharded.close()
        self._worker.close()

    def _fetch(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True) if x.device == self.root != self.device else x


def _forward(
    sharded: ShardedModel,
    arguments: dict[str, Any],
    stream: torch.cuda.Stream | None,
    ambience: Ambience,
    threads: int | None,
) -> None:
    """One rank's forward, on its thread. Its output is the root's, so it is dropped."""
    on_stream = nullcontext() if stream is None else torch.cuda.stream(stream)
    with on_stream, ambience.entered(), intra_op_threads(threads), sharded.carrier.guard():
        sharded.run(sharded.model, sharded.cut(arguments))
