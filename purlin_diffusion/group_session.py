"""Ranks as processes (or threads that have a communicator of their own): each holds its model and makes the same root calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from purlin_core.errors import PurlinError
from purlin_diffusion.arguments import bind
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.counters import Counters
from purlin_diffusion.graph.key import Key
from purlin_diffusion.graph.policy import Graphs, of_plan
from purlin_diffusion.graph.store import Wish
from purlin_diffusion.group_graphs import GroupGraphs
from purlin_diffusion.inputs import Carriers, agree, from_root
from purlin_diffusion.placement import device_of
from purlin_diffusion.plan import Plan
from purlin_diffusion.route import Route
from purlin_diffusion.session import refuse_gradients, settle
from purlin_diffusion.sharded import ShardedModel


class GroupSession:
    """One parallel model on one rank. `owned`: the carriers are this session's to close."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mode: str,
        carriers: Carriers,
        route: Route,
        *,
        owned: bool,
        graphs: Graphs,
        off: str = "",
    ) -> None:
        """`off`: why this rank may make no recordings, beside what its plan says."""
        self.rank, self.ranks = carriers.device.rank, carriers.device.ranks
        self.route = route
        self._carriers, self._owned = carriers, owned
        self._lock = threading.RLock()
        self._closed = False
        device = device_of(model)
        why = graphs.off(device, of_plan(plan), off)
        self._graphs = GroupGraphs([] if why else [graphs.pool(device)], graphs.limits, why)
        self._sharded = ShardedModel(model, plan, carriers.device, mode, around=self._call)

    @property
    def carriers(self) -> Sequence[Carrier]:
        return (self._carriers.device,)

    @property
    def sharded(self) -> ShardedModel:
        return self._sharded

    def counters(self) -> tuple[Counters, ...]:
        return (self._sharded.counters(self._graphs.counts()),)

    @property
    def graphs_off(self) -> str:
        """Why there are no CUDA graphs; empty where there may be."""
        return self._graphs.off

    def on_all(self, fn: Callable[[nn.Module], Any]) -> Any:
        """fn(model) on this rank; the others call it too, with their own."""
        return fn(self._sharded.model)

    def close(self) -> None:
        """Give the model back as it was. Does nothing the second time."""
        if not self._closed:
            self._closed = True
            self._graphs.forget()
            self._sharded.close()
            if self._owned:
                for carrier in {id(c): c for c in (self._carriers.device, self._carriers.host)}.values():
                    carrier.close()

    def _call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            arguments, key, due = self._agreed(args, kwargs)
            if due is Wish.CAPTURE and not self._graphs.record(key, forward, arguments, self._sharded, self._carriers):
                due = Wish.EAGER
            if due is not Wish.EAGER:
                with self._carriers.device.guard():
                    output = self._graphs.replay(key, arguments, self._sharded)
                    settle(self._carriers.device, device_of(self._sharded.model))
                return output
            # Alike on every rank, as the arguments are, so an error here kills no carrier.
            share = self._sharded.cut(arguments)
            with self._carriers.device.guard():
                output = self._sharded.run(forward, share)
                settle(self._carriers.device, device_of(self._sharded.model))
            self._graphs.ran(key)
            return output

    def _agreed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Key, Wish]:
        """The root's arguments, their key here, and what all ranks do. What is wrong on this rank is told to the others, where it may be right."""
        try:
            self._sharded.doors.anchor()
            refuse_gradients(self._sharded.model)
            arguments = bind(self._sharded.model, args, kwargs)
        except PurlinError as error:
            if self.ranks > 1:
                agree([f"an error: {error}"], self._carriers.host)
            raise
        key, wish = self._graphs.look(self._sharded.model, arguments)
        arguments, wishes = from_root(arguments, self._carriers, int(wish))
        return arguments, key, Wish(min(wishes))
