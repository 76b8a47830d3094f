"""Ranks as processes (or threads that have a communicator of their own): each holds its model and makes the same root calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from purlin_core.errors import MismatchError, PeerError, PurlinError, StallError, in_words
from purlin_diffusion.ahead import Ahead
from purlin_diffusion.arguments import bind
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.counters import Counters
from purlin_diffusion.errors import InputsDifferError
from purlin_diffusion.glance import Watch
from purlin_diffusion.graph.key import Key
from purlin_diffusion.graph.policy import Graphs, of_plan
from purlin_diffusion.graph.store import Wish
from purlin_diffusion.group_graphs import GroupGraphs
from purlin_diffusion.guidance import Manner
from purlin_diffusion.hooked import hooks_in_words, refuse_for_processes
from purlin_diffusion.inputs import FAILED, Carriers, agree, from_root
from purlin_diffusion.placement import device_of
from purlin_diffusion.plan import Plan
from purlin_diffusion.route import Route
from purlin_diffusion.session import refuse_gradients
from purlin_diffusion.sharded import ShardedModel

_DEADLY = (MismatchError, PeerError, StallError)  # behind which there are no more calls


class GroupSession:
    """One parallel model on one rank. `owned`: the carriers are this session's to close."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        manner: Manner,
        carriers: Carriers,
        route: Route,
        *,
        device: torch.device,
        owned: bool,
        graphs: Graphs,
        off: str = "",
    ) -> None:
        """`device`: where exchanges run. `off`: why this rank may make no recordings, beside what its plan says."""
        self.rank, self.ranks = carriers.device.rank, carriers.device.ranks
        self.route = route
        self._carriers, self._owned = carriers, owned
        self._lock = threading.RLock()
        self._closed = False
        self._watch = Watch()
        self._ahead = Ahead([device], self.ranks, counts=True)
        here = device_of(model)
        why = graphs.off(here, of_plan(plan), off)
        self._graphs = GroupGraphs([] if why else [graphs.pool(here)], graphs.limits, why)
        self._sharded = ShardedModel(model, plan, carriers.device, manner, around=self._call)

    @property
    def carriers(self) -> Sequence[Carrier]:
        return (self._carriers.device,)

    @property
    def sharded(self) -> ShardedModel:
        return self._sharded

    @property
    def ahead(self) -> Ahead:
        return self._ahead

    def counters(self) -> tuple[Counters, ...]:
        return (self._sharded.counters(self._graphs.counts()),)

    @property
    def graphs_off(self) -> str:
        """Why there are no CUDA graphs; empty where there may be."""
        return self._graphs.off

    def on_all(self, fn: Callable[[nn.Module], Any]) -> Any:
        """fn(model) on this rank; the others call it too, with their own."""
        return fn(self._sharded.model)

    def check(self) -> None:
        """Wait for all calls that were launched. Raises what they met, as the next call would."""
        with self._lock, self._guarded():
            self._ahead.settled(self._carriers.device)

    def steps_ended(self, error: BaseException | None) -> None:
        """Raises InputsDifferError where this rank's steps have ended well, and another's have not ended, or not well."""
        if self.ranks == 1 or self._closed or isinstance(error, (*_DEADLY, InputsDifferError)):
            return  # those all ranks have heard
        with self._lock:
            if error is None:
                agree(["the end of the pipeline's steps"], self._carriers.host, picture=self._ahead.pictures)
                return
            with suppress(PurlinError):  # what this rank has met is being raised
                agree([f"{FAILED}{in_words(error)}"], self._carriers.host, picture=self._ahead.pictures)

    def close(self) -> None:
        """Give the model back as it was. Does nothing the second time."""
        if not self._closed:
            self._closed = True
            self._ahead.forget()  # replays end before their carriers close
            self._graphs.forget()
            self._sharded.close()
            if self._owned:
                for carrier in {id(c): c for c in (self._carriers.device, self._carriers.host)}.values():
                    carrier.close()

    def _call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            if self._ahead.moved():
                self.check()
            arguments, key, due = self._agreed(args, kwargs)
            if due is Wish.CAPTURE:
                self.check()
                if not self._graphs.record(key, forward, arguments, self._sharded, self._carriers):
                    due = Wish.EAGER
            if due is not Wish.EAGER:
                return self._launched(lambda: self._graphs.replay(key, arguments, self._sharded))
            # Alike on every rank, as the arguments are, so an error here kills no carrier.
            share = self._sharded.cut(arguments)
            output = self._launched(lambda: self._sharded.run(forward, share))
            self._graphs.ran(key)
            return output

    def _launched(self, launch: Callable[[], Any]) -> Any:
        with self._guarded():
            output = launch()
            self._ahead.launched(self._carriers.device)
        return output

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """An exception inside reaches the other ranks at once, those too that are ahead and wait for this one in the packet of the next call."""
        try:
            with self._carriers.host.guard(), self._carriers.device.guard():
                yield
        except BaseException:
            self._ahead.forget()
            raise

    def _agreed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Key, Wish]:
        """The root's arguments, their key here, and what all ranks do. What is wrong on this rank is told to the others, where it may be right; and a
        rank that has left a picture amid its steps, and begun another, is named."""
        where = self._ahead.place_in_loop()
        try:
            self._sharded.doors.anchor()
            refuse_gradients(self._sharded.model)
            arguments = bind(self._sharded.model, args, kwargs)
            state, hooked = self._watch.state(self._sharded.model)
            if hooked and self.ranks > 1:
                refuse_for_processes(self._sharded.model)
        except PurlinError as error:
            if self.ranks > 1:
                agree([f"{FAILED}{error}"], self._carriers.host, picture=self._ahead.pictures)
            raise
        key, wish = self._graphs.look(state, hooked, arguments)
        alike = hooks_in_words(self._sharded.model) if hooked else ""
        try:
            arguments, wishes = from_root(arguments, self._carriers, int(wish), where, alike, self._ahead.pictures)
        except _DEADLY as error:
            self._ahead.forget()  # the call before met the same
            raise type(error)(
                f"{error} There are no more calls: undo() and parallelize again, on every rank."
            ) from error
        return arguments, key, Wish(min(wishes))
