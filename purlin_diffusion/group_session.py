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
from purlin_diffusion.inputs import Carriers, agree, from_root
from purlin_diffusion.placement import device_of
from purlin_diffusion.plan import Plan
from purlin_diffusion.route import Route
from purlin_diffusion.session import refuse_gradients, settle
from purlin_diffusion.sharded import ShardedModel


class GroupSession:
    """One parallel model on one rank. `owned`: the carriers are this session's to close."""

    def __init__(
        self, model: nn.Module, plan: Plan, mode: str, carriers: Carriers, route: Route, *, owned: bool
    ) -> None:
        self.rank, self.ranks = carriers.device.rank, carriers.device.ranks
        self.route = route
        self._carriers, self._owned = carriers, owned
        self._lock = threading.RLock()
        self._closed = False
        self._sharded = ShardedModel(model, plan, carriers.device, mode, around=self._call)

    @property
    def carriers(self) -> Sequence[Carrier]:
        return (self._carriers.device,)

    @property
    def sharded(self) -> ShardedModel:
        return self._sharded

    def counters(self) -> tuple[Counters, ...]:
        return (self._sharded.counters(),)

    def on_all(self, fn: Callable[[nn.Module], Any]) -> Any:
        """fn(model) on this rank; the others call it too, with their own."""
        return fn(self._sharded.model)

    def close(self) -> None:
        """Give the model back as it was. Does nothing the second time."""
        if not self._closed:
            self._closed = True
            self._sharded.close()
            if self._owned:
                for carrier in {id(c): c for c in (self._carriers.device, self._carriers.host)}.values():
                    carrier.close()

    def _call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            arguments = self._agreed(args, kwargs)
            share = self._sharded.cut(
                arguments
            )  # alike on every rank, as the arguments are, so an error here kills no carrier
            with self._carriers.device.guard():
                output = self._sharded.run(forward, share)
                settle(self._carriers.device, device_of(self._sharded.model))
                return output

    def _agreed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The root's arguments. What is wrong on this rank is told to the others, where it may be right."""
        try:
            self._sharded.doors.anchor()
            refuse_gradients(self._sharded.model)
            arguments = bind(self._sharded.model, args, kwargs)
        except PurlinError as error:
            if self.ranks > 1:
                agree([f"an error: {error}"], self._carriers.host)
            raise
        return from_root(arguments, self._carriers)
