"""A rank that is a worker thread of this process, and the replica it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from purlin_diffusion.carrier import Carrier
from purlin_diffusion.compiler import compiled_by
from purlin_diffusion.graph.gate import Gate
from purlin_diffusion.graph.recorder import Pool
from purlin_diffusion.graph.take import Take
from purlin_diffusion.guidance import Manner
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

    def hold(self, root: ShardedModel, plan: Plan, carrier: Carrier, manner: Manner) -> None:
        """Take a new replica of the root's model."""
        replica = replicate(root.doors, self._sent)
        before = getattr(self, "sharded", None)
        self.sharded = ShardedModel(replica, plan, carrier, manner, counted=before.counters() if before else None)
        if before is not None:
            before.close()

    def start(
        self,
        arguments: Mapping[str, Any],
        ambience: Ambience,
        threads: int | None,
        *,
        branch: torch.cuda.Stream | None = None,
        counted: bool = True,
    ) -> Future[Any]:
        """Begin a forward with `arguments`, whose tensors lie on the root's device. On a GPU its work goes to the stream that is the caller's there,
        behind the copies of the arguments; ranks of one GPU share it, and torch's allocator sees one order. In a recording it goes to `branch`, which
        begins here; the caller joins it. `counted`: it is more than a recording."""
        here = map_tensors(dict(arguments), self._fetch)
        stream = self._stream() if branch is None else branch
        if branch is not None:
            branch.wait_stream(torch.cuda.current_stream(self.device))
        sharded = self.sharded

        def forward() -> None:
            sharded.run(compiled_by(ambience.compiler, sharded.model), sharded.cut(here), counted=counted)

        return self._begin(forward, stream, ambience, threads)

    def prepare(self, pool: Pool, branch: torch.cuda.Stream | None) -> Future[Any]:
        """What this rank's thread needs on `branch` before it takes part in a recording."""
        return self._worker.run(functools.partial(pool.prepare, branch))

    def record(
        self,
        take: Take,
        pool: Pool,
        gate: Gate,
        arguments: Mapping[str, Any],
        ambience: Ambience,
        threads: int | None,
    ) -> Future[Any]:
        """Begin to record a forward as `take`, together with the other ranks at `gate`."""
        here, sharded = map_tensors(dict(arguments), self._fetch), self.sharded
        model = compiled_by(ambience.compiler, sharded.model)

        def record() -> None:
            with gate:
                pool.prepare(None)
                take.record(
                    lambda inputs: sharded.run(model, sharded.cut(inputs), counted=False), here, ready=gate.wait
                )

        return self._begin(record, self._stream(), ambience, threads)

    def replay(self, take: Take, arguments: Mapping[str, Any], ambience: Ambience, threads: int | None) -> Future[Any]:
        """Begin a replay of `take` on `arguments`."""
        here = map_tensors(dict(arguments), self._fetch)
        return self._begin(functools.partial(take.replay, here), self._stream(), ambience, threads)

    def replace_thread(self) -> None:
        self._worker = Worker(f"purlin-rank-{self.rank}")

    def close(self) -> None:
        if hasattr(self, "sharded"):
            self.sharded.close()
        self._worker.close()

    def _begin(
        self, job: Callable[[], object], stream: torch.cuda.Stream | None, ambience: Ambience, threads: int | None
    ) -> Future[Any]:
        """job() on this rank's thread. Its output is the root's, so it is dropped."""
        return self._worker.run(functools.partial(_in_place, job, self.sharded.carrier, stream, ambience, threads))

    def _stream(self) -> torch.cuda.Stream | None:
        """The caller's, on this rank's device."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _fetch(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True) if x.device == self.root != self.device else x


def _in_place(
    job: Callable[[], object],
    carrier: Carrier,
    stream: torch.cuda.Stream | None,
    ambience: Ambience,
    threads: int | None,
) -> None:
    on_stream = nullcontext() if stream is None else torch.cuda.stream(stream)
    with on_stream, ambience.entered(), intra_op_threads(threads), carrier.guard():
        job()
