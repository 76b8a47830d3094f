"""Recordings of root calls on ranks that are threads of this process.

Ranks that share a GPU are recorded together, in one recording that the root replays: each on a stream that branches off the root's. Ranks with a GPU
each make a recording each, all at once: an exchange is launched when the last rank has come to it. One store decides for all, so they never differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from purlin_diffusion.graph.counts import GraphCounts
from purlin_diffusion.graph.gate import Gate
from purlin_diffusion.graph.key import Key, key_of
from purlin_diffusion.graph.policy import Graphs
from purlin_diffusion.graph.recorder import Pool
from purlin_diffusion.graph.state import ModelState, own_graphs
from purlin_diffusion.graph.store import Store, Wish
from purlin_diffusion.graph.take import Take
from purlin_diffusion.local_rank import LocalRank
from purlin_diffusion.sharded import Memo, ShardedModel
from purlin_diffusion.workers import Ambience

Start = Callable[[LocalRank], "Future[Any]"]


class Run(Protocol):
    """Starts something on every worker, does the root's part, and waits for all. Returns what the root's part did; raises what any did."""

    def __call__(self, start: Start, mine: Callable[[], Any], *, workers: bool = True) -> Any: ...


@dataclass(frozen=True)
class RootCall:
    """One call of the model."""

    forward: Callable[..., Any]
    arguments: Mapping[str, Any]
    ambience: Ambience
    threads: int | None


@dataclass(frozen=True)
class Recorded:
    """One call on all ranks: a take a rank that recorded, and what the call left known on each rank."""

    takes: Sequence[Take]
    memos: Sequence[tuple[ShardedModel, Memo]]

    def free(self) -> None:
        for take in self.takes:
            take.free()

    def recall(self) -> None:
        for sharded, memo in self.memos:
            sharded.recall(memo)


class LocalGraphs:
    """The recordings of one LocalSession."""

    def __init__(self, graphs: Graphs, devices: Sequence[torch.device], off: str, timeout: float) -> None:
        self._together = graphs.together(devices)
        recording = devices[:1] if self._together else devices
        pools = [] if off else [graphs.pool(device) for device in recording]
        self._branches = [pools[0].branch() for _ in devices[1:]] if pools and self._together else []
        self._store: Store[Recorded] = Store(pools, graphs.limits, off)
        self._timeout = timeout

    @property
    def off(self) -> str:
        return self._store.off

    def look(self, arguments: Mapping[str, Any], state: tuple[ModelState, str] | None) -> tuple[Key | None, Wish]:
        """The key of a call, and what is due. `state`: the model's; it may be None where graphs are off."""
        if self._store.off or state is None:
            return None, Wish.EAGER
        key = key_of(arguments, *state)
        return key, self._store.look(key)

    def ran(self, key: Key | None) -> None:
        if key is not None and not self._store.off:
            self._store.ran(key)

    def failed(self, key: Key | None, why: str) -> None:
        if key is not None:
            self._store.failed(key, why)

    def forget(self) -> None:
        self._store.forget()

    def counts(self, rank: int) -> GraphCounts:
        pools = self._store.pools
        return self._store.counts(pools[rank] if rank < len(pools) else None)

    def replay(self, key: Key, call: RootCall, run: Run) -> Any:
        recorded = self._store.use(key)
        takes = recorded.takes
        output = run(
            lambda worker: worker.replay(takes[worker.rank], call.arguments, call.ambience, call.threads),
            lambda: takes[0].replay(call.arguments),
            workers=not self._together,
        )
        recorded.recall()
        return output

    def record(self, key: Key, call: RootCall, run: Run, root: ShardedModel, workers: Sequence[LocalRank]) -> bool:
        """Whether the call was recorded and kept; nothing has run then, so replay() comes next. Raises what went wrong."""
        if why := own_graphs(root.model, call.ambience.compiler):  # it was compiled since
            self._store.stop(why)
            return False
        self._store.measure()
        began = time.perf_counter()
        takes = [Take(pool) for pool in self._store.pools]
        try:
            if self._together:
                self._record_together(takes[0], call, run, root, workers)
            else:
                self._record_apart(takes, call, run, root)
        except BaseException:
            for take in takes:
                take.free()
            raise
        memos = [(sharded, sharded.memo()) for sharded in (root, *(worker.sharded for worker in workers))]
        return self._store.add(key, Recorded(takes, memos), 1e3 * (time.perf_counter() - began))

    def _record_together(
        self, take: Take, call: RootCall, run: Run, root: ShardedModel, workers: Sequence[LocalRank]
    ) -> None:
        pool: Pool = self._store.pools[0]
        branches = dict(zip((worker.rank for worker in workers), self._branches, strict=True))
        pool.prepare(None)
        for worker in workers:
            worker.prepare(pool, branches[worker.rank]).result(self._timeout)

        ambience = replace(call.ambience, autocast_cache=False)  # as Take.record() has it on this thread

        def body(inputs: dict[str, Any]) -> Any:
            share = root.cut(inputs)
            output = run(
                lambda worker: worker.start(
                    inputs, ambience, call.threads, branch=branches[worker.rank], counted=False
                ),
                lambda: root.run(call.forward, share, counted=False),
            )
            for branch in filter(None, self._branches):
                torch.cuda.current_stream(pool.device).wait_stream(branch)
            return output

        take.record(body, call.arguments)

    def _record_apart(self, takes: Sequence[Take], call: RootCall, run: Run, root: ShardedModel) -> None:
        gate = Gate(len(takes), self._timeout)
        pools = self._store.pools

        def body(inputs: dict[str, Any]) -> Any:
            return root.run(call.forward, root.cut(inputs), counted=False)

        def mine() -> None:
            with gate:
                pools[0].prepare(None)
                takes[0].record(body, call.arguments, ready=gate.wait)

        def start(worker: LocalRank) -> Future[Any]:
            take, pool = takes[worker.rank], pools[worker.rank]
            return worker.record(take, pool, gate, call.arguments, call.ambience, call.threads)

        run(start, mine)
