"""Ranks as threads of this process: the caller's thread is the root and runs the model it was given, worker threads run replicas of it.

There is one pipeline, scheduler and text encoder. Each root call hands its inputs to the workers and waits for all of them: a rank's exception
surfaces in the caller. On GPUs the wait is for what ranks launch; how much later the caller hears what that has met, ahead.py says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import nn

from purlin_core.errors import ClosedError, PeerError
from purlin_diffusion.ahead import Ahead
from purlin_diffusion.arguments import bind
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.compiler import compiled_anyway, is_compiled
from purlin_diffusion.config import ParallelConfig
from purlin_diffusion.counters import Counters
from purlin_diffusion.errors import RankError
from purlin_diffusion.glance import Watch
from purlin_diffusion.graph.key import Key
from purlin_diffusion.graph.policy import Graphs, of_plan, of_threads
from purlin_diffusion.graph.store import Wish, one_line
from purlin_diffusion.guidance import Manner
from purlin_diffusion.hooked import refuse_for_replicas
from purlin_diffusion.local_graphs import LocalGraphs, RootCall, Start
from purlin_diffusion.local_rank import LocalRank
from purlin_diffusion.plan import Plan
from purlin_diffusion.route import Opened, Route, open_local
from purlin_diffusion.session import refuse_gradients
from purlin_diffusion.sharded import ShardedModel
from purlin_diffusion.workers import Ambience, intra_op_threads, same_kernels, same_threads

END_SECONDS = 10.0  # how long ranks may take to notice that another has left


class LocalSession:
    """One parallel model and its ranks."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        manner: Manner,
        config: ParallelConfig,
        devices: Sequence[torch.device],
        graphs: Graphs,
        off: str = "",
    ) -> None:
        """`off`: why there may be no CUDA graphs, beside what the plan and the route say."""
        self.rank, self.ranks = 0, len(devices)
        self._plan, self._manner, self._config, self._devices = plan, manner, config, devices
        self._lock = threading.RLock()
        self._closed = False
        self._started: Sequence[Future[Any]] = ()  # what workers do in this root call
        self._watch = Watch()
        self._ahead = Ahead(devices, len(devices))
        self._threads = max(1, torch.get_num_threads() // len(devices)) if devices[0].type == "cpu" else None
        self.route, world = self._open(config.backend)
        self._world: Opened | None = world
        self._graphs = LocalGraphs(graphs, devices, "nothing yet", config.timeout)  # until all is well
        self._workers = [LocalRank(rank, devices[0], device) for rank, device in enumerate(devices) if rank > 0]
        try:
            self._root = ShardedModel(model, plan, world.carriers[0], manner, around=self._call)
            self._seen: Hashable = None
            self._compiled = False  # is the model, or a module in it, so that replicas are too? As of `_seen`
            reasons = (of_plan(plan), of_threads(self.route.backend, len(devices)), off)
            self._graphs = LocalGraphs(graphs, devices, graphs.off(devices[0], *reasons), config.timeout)
            self._follow()
        except BaseException:
            self.close()
            raise

    @property
    def carriers(self) -> Sequence[Carrier]:
        return self._world.carriers if self._world else ()

    @property
    def sharded(self) -> ShardedModel:
        return self._root

    @property
    def ahead(self) -> Ahead:
        return self._ahead

    def counters(self) -> tuple[Counters, ...]:
        ranks = (self._root, *(worker.sharded for worker in self._workers))
        return tuple(sharded.counters(self._graphs.counts(rank)) for rank, sharded in enumerate(ranks))

    @property
    def graphs_off(self) -> str:
        """Why there are no CUDA graphs; empty where there may be."""
        return self._graphs.off

    def on_all(self, fn: Callable[[nn.Module], Any]) -> Any:
        """fn(model), then replicas that have followed whatever it did."""
        with self._lock:
            if self._world is None:
                self._reopen()
            result = fn(self._root.model)
            self._seen = None
            self._graphs.forget()  # what it did may be seen from nowhere
            self._follow()
            return result

    def steps_ended(self, error: BaseException | None) -> None:
        """There is one loop for all ranks: nobody has to be told."""

    def check(self) -> None:
        """Wait for all calls that were launched. Raises what they met, as the next call would."""
        with self._lock:
            try:
                self._ahead.settled(self._root.carrier)
            except BaseException:
                self._break_off()
                raise

    def close(self) -> None:
        """Give the model back as it was, end the threads. Does nothing the second time."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if hasattr(self, "_root"):
                self._root.close()
            for worker in self._workers:
                worker.close()
            self._close_world()

    # One root call

    def _call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock, intra_op_threads(self._threads), same_kernels():
            refuse_gradients(self._root.model)
            arguments = bind(self._root.model, args, kwargs)
            if self._ahead.moved():
                self.check()
            if self._world is None:
                self._reopen()
            self._root.doors.anchor()
            self._follow()
            call = RootCall(forward, arguments, Ambience.here(), self._threads)
            with compiled_anyway(self._compiled or (bool(self._workers) and call.ambience.compiler is not None)):
                return self._answer(call)

    def _answer(self, call: RootCall) -> Any:
        """By a replay, or eagerly."""
        key, due = self._graphs.look(call.arguments, self._state)
        if due is Wish.CAPTURE and key is not None:
            self.check()
            due, why = self._record(key, call)
        else:
            why = ""
        if due is Wish.REPLAY and key is not None:
            return self._graphs.replay(key, call, self._run)
        output = self._run_eagerly(call)
        if why:
            self._graphs.failed(key, why)
        else:
            self._graphs.ran(key)
        return output

    def _run_eagerly(self, call: RootCall) -> Any:
        # What is wrong with the arguments is raised here, before any rank has begun.
        share = self._root.cut(call.arguments)
        return self._run(
            lambda worker: worker.start(call.arguments, call.ambience, call.threads),
            lambda: self._root.run(call.forward, share),
        )

    def _record(self, key: Key, call: RootCall) -> tuple[Wish, str]:
        """Record a call: whether it is to be replayed or run eagerly now, and why it could not be recorded."""
        try:
            kept = self._graphs.record(key, call, self._attempt, self._root, self._workers)
            return (Wish.REPLAY if kept else Wish.EAGER), ""
        except Exception as error:
            self._break_off()
            self._reopen()
            return Wish.EAGER, one_line(error)
        except BaseException:
            self._break_off()
            raise

    def _run(self, start: Start, mine: Callable[[], Any], *, workers: bool = True) -> Any:
        """A part of a root call that all ranks do, see Run. After a failure the next call has new carriers."""
        try:
            output = self._attempt(start, mine, workers=workers)
            self._ahead.launched(self._root.carrier)
            return output
        except BaseException:
            self._break_off()
            raise

    def _attempt(self, start: Start, mine: Callable[[], Any], *, workers: bool = True) -> Any:
        self._started = [start(worker) for worker in self._workers] if workers else []
        try:
            with self._root.carrier.guard():
                output = mine()
            failed = self._first_failure(self._config.timeout)
        except BaseException as error:
            failed = self._first_failure(END_SECONDS)
            if failed is not None and isinstance(error, PeerError) and not isinstance(failed.__cause__, PeerError):
                raise failed from failed.__cause__  # the root has met its echo
            raise
        if failed is not None:
            raise failed from failed.__cause__
        return output

    def _first_failure(self, seconds: float) -> RankError | None:
        """The exception of a worker, told with its rank: one that is not the echo of another rank's, if there is one. Waits `seconds` for all."""
        started = self._started
        done, late = wait(started, timeout=seconds)
        errors = {rank: future.exception() for rank, future in enumerate(started, start=1) if future in done}
        own = [(rank, error) for rank, error in errors.items() if error is not None]
        own.sort(key=lambda pair: isinstance(pair[1], PeerError))
        if own:
            rank, error = own[0]
            failure = RankError(
                f"rank {rank} of {self.ranks} ({self._devices[rank]}): {type(error).__name__}: {error}", rank
            )
            failure.__cause__ = error
            return failure
        if late:
            rank = started.index(next(iter(late))) + 1
            return RankError(
                f"rank {rank} of {self.ranks} has not ended its forward. undo() and parallelize again.", rank
            )
        return None

    def _break_off(self) -> None:
        """After a failure: new carriers at the next call, and new threads for those that are stuck."""
        self._close_world()
        for rank, future in enumerate(self._started):
            if not future.done():
                self._workers[rank].replace_thread()
        self._started = ()

    # Ranks that follow

    def _open(self, backend: str) -> tuple[Route, Opened]:
        with same_threads():
            return open_local(self._config, self._devices, backend=backend)

    def _close_world(self) -> None:
        self._ahead.forget()  # replays end before their carriers close
        self._graphs.forget()
        if self._world is not None:
            with same_threads():
                self._world.close()
            self._world = None

    def _reopen(self) -> None:
        if self._closed:
            raise ClosedError("parallelize: this model's ranks have ended. Call parallelize again.")
        _, world = self._open(self.route.backend)
        self._world = world
        for sharded, carrier in zip(
            (self._root, *(worker.sharded for worker in self._workers)), world.carriers, strict=True
        ):
            sharded.reconnect(carrier)

    def _follow(self) -> None:
        """Make the replicas anew when the model has changed since they were made."""
        self._state = self._watch.state(self._root.model) if self._workers or not self._graphs.off else None
        seen = self._state[0].fingerprint if self._workers and self._state else ()
        if self._workers and self._state and self._state[1]:
            refuse_for_replicas(self._root.model, anew=seen != self._seen)
        if seen == self._seen:
            return
        self.check()  # what ran last may still read what goes
        assert self._world is not None
        for worker in self._workers:
            worker.hold(self._root, self._plan, self._world.carriers[worker.rank], self._manner)
        self._seen, self._compiled = seen, bool(self._workers) and is_compiled(self._root.model)
        if self._state is not None:
            self._state = self._watch.state(self._root.model)  # doors were lifted, and put back other forwards
