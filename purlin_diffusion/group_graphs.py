"""Recordings of root calls on ranks that are processes: each makes its own. What is done with a call they settle in the packet that every call begins
with, and whether all could record it before anyone replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from purlin_diffusion.compiler import paused_compiler
from purlin_diffusion.graph.counts import GraphCounts
from purlin_diffusion.graph.key import Key, key_of
from purlin_diffusion.graph.recorder import Pool
from purlin_diffusion.graph.state import ModelState, own_graphs
from purlin_diffusion.graph.store import Limits, Store, Wish
from purlin_diffusion.graph.take import Take
from purlin_diffusion.inputs import Carriers, tell
from purlin_diffusion.sharded import Memo, ShardedModel

_OFF = Key((), ())
_NO_ROOM = "its recordings take too much memory"


@dataclass(frozen=True)
class Recorded:
    """One call on this rank, and what it left known."""

    take: Take
    memo: Memo

    def free(self) -> None:
        self.take.free()


class GroupGraphs:
    """The recordings of one GroupSession."""

    def __init__(self, pools: Sequence[Pool], limits: Limits, off: str) -> None:
        self._store: Store[Recorded] = Store(pools, limits, off)

    @property
    def off(self) -> str:
        return self._store.off

    def look(self, state: ModelState, unfit: str, arguments: Mapping[str, Any]) -> tuple[Key, Wish]:
        """The key of a call on this rank, and what this rank would do. `state`, `unfit`: of the model, see state.py."""
        if self._store.off:
            return _OFF, Wish.EAGER
        key = key_of(arguments, state, unfit)
        return key, self._store.look(key)

    def ran(self, key: Key) -> None:
        if not self._store.off:
            self._store.ran(key)

    def forget(self) -> None:
        self._store.forget()

    def counts(self) -> GraphCounts:
        return self._store.counts(next(iter(self._store.pools), None))

    def record(
        self,
        key: Key,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any],
        sharded: ShardedModel,
        carriers: Carriers,
    ) -> bool:
        """Whether every rank has recorded the call and kept it; nothing has run then, so replay() comes next. Collective."""
        self._store.drop(key)  # one that another rank has not
        with carriers.device.guard():
            own = own_graphs(sharded.model, paused_compiler())  # it was compiled since
            why = own or self._recorded(key, forward, arguments, sharded)
            whys = tell(why, carriers.host) if carriers.host.ranks > 1 else [why]
        if own:
            self._store.stop(own)
            return False
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(whys) if text not in ("", _NO_ROOM)]
        if failures:
            self._store.failed(key, "; ".join(failures))
        elif any(whys):
            self._store.drop(key)  # the rank that has no room has refused the call, or will record it alone next time
        return not any(whys)

    def replay(self, key: Key, arguments: Mapping[str, Any], sharded: ShardedModel) -> Any:
        recorded = self._store.use(key)
        output = recorded.take.replay(arguments)
        sharded.recall(recorded.memo)
        return output

    def _recorded(
        self, key: Key, forward: Callable[..., Any], arguments: Mapping[str, Any], sharded: ShardedModel
    ) -> str:
        """Why the call could not be recorded, or kept; empty when it was."""
        self._store.measure()
        pool = self._store.pools[0]
        take, began = Take(pool), time.perf_counter()
        try:
            pool.prepare(None)
            take.record(lambda inputs: sharded.run(forward, sharded.cut(inputs), counted=False), arguments)
        except Exception as error:
            return self._store.broke(error)
        ms = 1e3 * (time.perf_counter() - began)
        return "" if self._store.add(key, Recorded(take, sharded.memo()), ms) else _NO_ROOM
