"""A communicator: ranks that exchange tensors by specs, with the names and argument order of torch.distributed where it has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from purlin_core import ops
from purlin_core.arguments import (
    check_budget,
    check_empty,
    check_heap_bytes,
    check_memory,
    check_sequence,
    check_shares,
    check_types,
)
from purlin_core.atom import atom_of
from purlin_core.canary import poison
from purlin_core.collectives import as_spec, halo_spec, rows_of
from purlin_core.connection import Connection
from purlin_core.errors import (
    ClosedError,
    ConcurrentUseError,
    DeviceError,
    PurlinError,
    SetupError,
)
from purlin_core.facts import facts_of
from purlin_core.memory import address_of
from purlin_core.plan import FrozenSizes, freeze_sizes
from purlin_core.plans import Plans, Stats
from purlin_core.prepare import Asked, Prepared, in_place, prepare, prepare_all_to_all
from purlin_core.ranges import named
from purlin_core.recorder import Recorder
from purlin_core.rendezvous import LocalRendezvous, meeting_of
from purlin_core.results import are_granted, in_heap, ordinary, prepare_granted
from purlin_core.settings import Settings
from purlin_core.spec import Op, Sizes
from purlin_core.terms import check_arguments
from purlin_core.trace import joined
from purlin_core.tune import Scratch, Tuning, most_teams

MAX_RANKS = 16
_OVERLAP, _CONCURRENT = 16, 17  # Outcome in csrc/purlin/endpoint.hpp


class Communicator:
    """The ranks of one group, and this process's (or thread's) place among them.

    `group`: a torch process group, a device mesh of one dim, None for the default group; or a torch Store together with `rank` and `ranks`.
    `device`: "cpu", or a GPU of this rank's own; "cuda" is the current one. `timeout`: seconds a call waits for a peer before it fails with
    StallError on every rank. `setup_timeout`: the same for making the communicator. `heap_bytes`: room for empty(), the same on every rank.
    `teams`: workers a call is dealt to; on the CPU one thread does the work of all, on a GPU each is a block, or two or three where a call is large
    and `teams` is None: then tuning chooses how many, up to 32; on the CPU it is 1. `scratch`: other sizes of the inbox than the device's, `teams`
    among them; they decide which regime a call takes. `tuning`: another table than the device's. `granted_results`: what exchange() and
    redistribute() make themselves comes from the heap while it has room, so that peers write it directly; the same on every rank, and so is what
    lives of it.

    On a GPU a call returns when it is enqueued on the current stream; one stream at a time, and where it changes an event keeps the order. What
    fails then shows at the next call and at check(). A call can be captured into a CUDA graph once it has been made before, or by plan(). Replays
    are calls: they take their turn among the others, on all ranks alike, and end before close().
    Raises SetupError and DeviceError.
    """

    def __init__(
        self,
        group: Any = None,
        device: torch.device | str = "cpu",
        *,
        rank: int | None = None,
        ranks: int | None = None,
        timeout: float = 300.0,
        setup_timeout: float = 60.0,
        heap_bytes: int = 0,
        teams: int | None = None,
        scratch: Scratch | None = None,
        tuning: Tuning | None = None,
        granted_results: bool = False,
    ) -> None:
        self._atom = atom_of(device)
        self.device = self._atom.device
        check_arguments(timeout, setup_timeout, heap_bytes, teams, scratch, tuning)
        meeting = meeting_of(group, rank, ranks)
        if meeting.ranks > MAX_RANKS:
            raise SetupError(
                f"Communicator: needs at most {MAX_RANKS} ranks; got {meeting.ranks}. Put more on an outer mesh axis."
            )
        if teams is not None and not 1 <= teams <= most_teams(meeting.ranks):
            needed = f"1 to {most_teams(meeting.ranks)} `teams` with {meeting.ranks} ranks"
            raise SetupError(f"Communicator: needs {needed}; got {teams}.")
        self.rank, self.ranks = meeting.rank, meeting.ranks
        self._settings = Settings.from_environment()
        self._terms = {"timeout": float(timeout), "setup_timeout": float(setup_timeout)}
        self._meeting = meeting
        sharing = meeting.sharing if isinstance(meeting, LocalRendezvous) else 1
        self._scratch = scratch or self._atom.scratch(self.ranks, teams=teams, sharing=sharing)
        self._tuning = tuning or self._atom.tuning
        self._blocks = teams or self._atom.processors // sharing
        self._granted_results = bool(granted_results)
        self._budget = 0  # blocks of a call, inside budget()
        # what barrier() moves
        self._marks = tuple(torch.zeros(n, dtype=torch.uint8, device=self.device) for n in (self.ranks, 1))
        self._opened = 0
        self._over = ""  # why there are no more calls
        self.id = ops.register(self)
        self._open(heap_bytes, Stats())

    def _open(self, heap_bytes: int, before: Stats) -> None:
        self._tie = Connection(
            self._meeting,
            self._atom,
            self._scratch,
            self._tuning,
            self._settings,
            heap_bytes=heap_bytes,
            blocks=self._blocks,
            **self._terms,
        )
        self._plans = Plans(before)
        self._last: Prepared | None = None
        self._opened += 1
        joined(self)

    # ---- collectives

    def redistribute(
        self,
        x: Tensor,
        spec: str,
        *,
        sizes: Sizes | None = None,
        op: Op = "sum",
        out: Tensor | None = None,
        tag: str = "",
    ) -> Tensor:
        """`x` in the layout of the spec's left side -> a tensor in the layout of its right side.

        `x`: this rank's part; any dtype for copies, any strides. `sizes`: rows a rank of sharded names, where they are not equal. `op`, of partial
        inputs: sum, avg, max, min. `tag` names the call site; ranks must agree on it. Raises SpecError, ShapeError, DtypeError, DeviceError and
        AliasError before anything is sent; MismatchError, StallError or PeerError on every rank when ranks disagree or do not come.
        """
        return self.exchange(
            [x], spec, sizes=sizes, op=op, out=None if out is None else [out], tag=tag, call="redistribute"
        )[0]

    def exchange(
        self,
        tensors: Sequence[Tensor],
        specs: str | Sequence[str],
        *,
        sizes: Sizes | None = None,
        op: Op = "sum",
        out: Sequence[Tensor] | None = None,
        tag: str = "",
        call: str = "exchange",
    ) -> list[Tensor]:
        """redistribute() of several tensors at once: one plan, one notify a peer. `specs`: one for all, or one a tensor. `call` is for texts."""
        if torch.compiler.is_dynamo_compiling():
            return ops.exchange(self.id, tensors, specs, sizes=sizes, op=op, out=out, tag=tag)
        return self.exchange_now(tensors, specs, sizes=sizes, op=op, out=out, tag=tag, call=call)

    def exchange_now(
        self,
        tensors: Sequence[Tensor],
        specs: str | Sequence[str],
        *,
        sizes: Sizes | None,
        op: Op,
        out: Sequence[Tensor] | None,
        tag: str,
        call: str = "exchange",
    ) -> list[Tensor]:
        """exchange() past the compiler: what its operator runs."""
        check_sequence(call, tensors)
        try:
            texts = specs if isinstance(specs, str) else tuple(specs)
            return self._call(call, tensors, out, texts, freeze_sizes(sizes) if sizes else (), op, tag)
        except (AttributeError, TypeError):
            check_types(call, tensors, out, specs, sizes, op=op, tag=tag)
            raise

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        """`x` (n, ...) of every rank, in rank order -> `out` (ranks * n, ...) or (ranks, n, ...). `sizes`: rows a rank, where they differ."""
        return self._into("all_gather_into_tensor", out, x, sizes, "sum")

    def reduce_scatter_tensor(
        self, out: Tensor, x: Tensor, op: Op = "sum", *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """`x` (ranks * n, ...) reduced over the ranks -> my rows of it, `out` (n, ...). `sizes`: rows a rank, where they differ."""
        return self._into("reduce_scatter_tensor", out, x, sizes, op)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Tensor:
        """`x` reduced over the ranks, in place. Large ones are fastest where every rank's `x` is a tensor of empty()."""
        return self._into("all_reduce", x, x, None, op)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None = None, in_sizes: Sequence[int] | None = None
    ) -> Tensor:
        """in_sizes[d] rows of `x` go to rank d; out_sizes[s] rows of `out` come from rank s, in rank order. None for both: equal shares."""
        if out_sizes is None and in_sizes is None:
            return self._into("all_to_all_single", out, x, None, "sum")
        try:
            return self._all_to_all(out, x, out_sizes, in_sizes)
        except (AttributeError, TypeError):
            check_types("all_to_all_single", [x], [out], "", None)
            check_shares("all_to_all_single", {"out_sizes": out_sizes, "in_sizes": in_sizes})
            raise

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None, in_sizes: Sequence[int] | None
    ) -> Tensor:
        shares = tuple(None if sizes is None else tuple(sizes) for sizes in (out_sizes, in_sizes))
        facts, (at, to) = facts_of((x, out))
        key = ("all_to_all_single", shares, self._budget, facts)
        prepared = self._plans.get(key)
        if prepared is None:
            asked = Asked("all_to_all_single", "", (), "sum", "", self.device, False, self._budget)
            make = partial(prepare_all_to_all, self._tie.site, asked, x, out, *shares)
            prepared = self._planned(key, "all_to_all_single", make)
        self._run(prepared, (x,), (out,), [at], [to], key)
        return out

    def halo(
        self, x: Tensor, dim: int, rows: int | tuple[int, int], *, sizes: Sequence[int] | None = None, tag: str = ""
    ) -> Tensor:
        """`x`, my rows of dim `dim` -> the same with `rows` more from each neighbour, or (before, after); none beyond the first and the last rank."""
        check_types("halo", [x], None, "", None)
        spec, name = halo_spec(x, dim, rows)
        return self.exchange([x], spec, sizes=rows_of(name, sizes), tag=tag, call="halo")[0]

    def barrier(self) -> None:
        """Return when every rank has called it. On a GPU the stream waits for that, not the host."""
        out, x = self._marks
        self._into("barrier", out, x, None, "sum")

    @contextmanager
    def budget(self, blocks: int) -> Iterator[None]:
        """Calls (and plans) inside take at most `blocks` blocks of a GPU each, the same on every rank, and leave the rest to what runs beside them.

        One of the largest needs 8 to 16 for most of what the link gives. On the CPU nothing changes. Raises ShapeError unless `blocks` is 1 or more.
        """
        check_budget(blocks)
        before, self._budget = self._budget, blocks
        try:
            yield
        finally:
            self._budget = before

    # ---- memory and what is known of calls

    def empty(self, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that can be granted: passed as `out` by every rank, peers write an exchange's result straight into it.

        In an all-reduce they read it there, too. Freeing is local.
        Raises ShapeError when the heap has no room (`heap_bytes`, reserve()).
        """
        self._usable("empty")
        check_empty(shape, dtype)
        return self._tie.heap.empty((shape,) if isinstance(shape, int) else shape, dtype)

    def reserve(self, heap_bytes: int) -> None:
        """Collective: give every rank a new heap of `heap_bytes` for empty(). Tensors of the old one stay valid, but are ordinary from now on."""
        self._usable("reserve")
        check_heap_bytes("reserve", heap_bytes)
        self._tie.gather(None)  # nobody is still in a call
        old = self._tie
        self._open(heap_bytes, self.stats())
        old.part()

    def plan(
        self,
        tensors: Sequence[Tensor],
        specs: str | Sequence[str],
        *,
        sizes: Sizes | None = None,
        op: Op = "sum",
        out: Sequence[Tensor] | None = None,
        tag: str = "",
        call: str = "exchange",
    ) -> Prepared:
        """What exchange() (or another `call`: "redistribute", "halo") runs for these tensors; `.explain()` says it in words.

        Nothing is sent. The plan is kept: a call like this one can then be captured into a CUDA graph.
        """
        self._usable("plan")
        check_sequence("plan", tensors)
        check_types("plan", tensors, out, specs, sizes, op=op, tag=tag)
        texts = specs if isinstance(specs, str) else tuple(specs)
        granted = out is not None and self._tie.heap.holds_all(out)
        asked = Asked(call, texts, freeze_sizes(sizes), op, tag, self.device, granted, self._budget)
        wanted = None if out is None else facts_of(out)[0]
        # as _call() has it
        key = (call, texts, asked.sizes, op, tag, self._budget, granted, facts_of(tensors)[0], wanted)
        return self._plans.get(key) or self._plan_call(key, asked, tensors, out)

    def stats(self) -> Stats:
        """Calls and bytes of this rank so far."""
        return self._plans.stats(self._tie.site.geometry)

    @property
    def captured_together(self) -> bool:
        """Whether its calls can go into a CUDA graph only while those of its peers do: ranks are threads that launch together, or share a GPU."""
        meeting = self._meeting
        return isinstance(meeting, LocalRendezvous) and (meeting.fused or meeting.sharing > 1)

    def recorded(self, most: int) -> Recorder | None:
        """For trace(): write down what calls do from now on. None where there are no more, none yet, or they are being written down."""
        tie = getattr(self, "_tie", None)
        if self._over or tie is None or tie.recorder is not None:
            return None
        meeting = self._meeting
        if isinstance(meeting, LocalRendezvous):
            return Recorder(tie, (meeting.world, self._opened), alone=False, most=most)
        return Recorder(tie, (meeting, self._opened), alone=self.ranks > 1, most=most)

    # ---- health

    def check(self) -> None:
        """Raise the error that killed this communicator, if one did."""
        self._usable("check")
        error = self._tie.error(self._last)
        if error is not None:
            raise error

    def abort(self, reason: str) -> None:
        """Make the pending or next call of every rank raise PeerError with this reason. The communicator is dead from then on."""
        if not self._over:
            self._tie.tell_why(reason)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """An exception inside becomes a PeerError on the other ranks at once, not a stall at their deadline."""
        try:
            yield
        except BaseException as error:
            if not self._over and self._tie.healthy:
                first_line = str(error).strip().partition("\n")[0]
                self.abort(f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__)
            raise

    def close(self) -> None:
        """Part from the peers, waiting up to 5 s for them. Idempotent; later calls raise ClosedError."""
        if not self._over:
            self._over = "is closed"
            self._tie.part()
            self._plans = Plans(self._plans.stats())

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one call

    def _into(self, call: str, out: Tensor, x: Tensor, sizes: Sequence[int] | None, op: Op) -> Tensor:
        """A collective of torch's: its spec follows from its name and the dims of `x`. The shortest way, for it is the latency of small calls."""
        if torch.compiler.is_dynamo_compiling():
            spec, shaped, into = as_spec(call, x, out, self.ranks)
            ops.exchange(self.id, [shaped], spec, sizes=rows_of("d0", sizes), op=op, out=[into], tag="")
            return out
        try:
            facts, (at, to) = facts_of((x, out))
            heap, rows = self._tie.heap, None if sizes is None else tuple(sizes)
            key = (call, op, rows, self._budget, heap.lo <= to < heap.hi, out is x, facts)
            prepared = self._plans.get(key)
            if prepared is None:
                prepared = self._planned(key, call, partial(self._prepare_into, call, out, x, sizes, op))
            self._run(prepared, (x,), (out,), [at], [to], key)
        except (AttributeError, TypeError):
            check_types(call, [x], [out], "", rows_of("d0", sizes), op=op)
            raise
        return out

    def _prepare_into(self, call: str, out: Tensor, x: Tensor, sizes: Sequence[int] | None, op: Op) -> Prepared:
        granted = self._tie.heap.holds_all([out])
        spec, shaped, into = as_spec(call, x, out, self.ranks)
        asked = Asked(call, spec, freeze_sizes(rows_of("d0", sizes)), op, "", self.device, granted, self._budget)
        prepared = prepare(self._tie.site, asked, [shaped], [into])
        if out is x:
            to = address_of(out)
            prepared = in_place(self._tie.site, prepared, [to], [to])
        return prepared

    def _call(
        self,
        call: str,
        tensors: Sequence[Tensor],
        out: Sequence[Tensor] | None,
        specs: str | tuple[str, ...],
        sizes: FrozenSizes,
        op: Op,
        tag: str,
    ) -> list[Tensor]:
        facts, at = facts_of(tensors)
        wanted, to = (None, None) if out is None else facts_of(out)
        granted = out is not None and self._tie.heap.holds_all(out)
        key = (call, specs, sizes, op, tag, self._budget, granted, facts, wanted)
        prepared = self._plans.get(key)
        if prepared is None:
            asked = Asked(call, specs, sizes, op, tag, self.device, granted, self._budget)
            prepared = self._plan_call(key, asked, tensors, out)
        if out is None:
            if are_granted(prepared):
                prepared, key, out = self._in_heap(prepared, key, tensors)
            else:
                out = ordinary(prepared, tensors)
        self._run(prepared, tensors, out, at, to or [address_of(o) for o in out], key)
        return list(out)

    def _plan_call(self, key: Any, asked: Asked, tensors: Sequence[Tensor], out: Sequence[Tensor] | None) -> Prepared:
        if out is None and self._granted_results:
            return self._planned(key, asked.call, partial(prepare_granted, self._tie.site, asked, tensors))
        return self._planned(key, asked.call, partial(prepare, self._tie.site, asked, tensors, out))

    def _in_heap(self, prepared: Prepared, key: Any, tensors: Sequence[Tensor]) -> tuple[Prepared, Any, list[Tensor]]:
        """Granted results; without room another plan, and ordinary ones."""
        results = in_heap(prepared, tensors, self._tie.heap)
        if results is None:
            call, specs, sizes, op, tag, budget = key[:6]
            asked = Asked(call, specs, sizes, op, tag, self.device, False, budget)
            key = (key, "ordinary")
            plan = partial(prepare, self._tie.site, asked, tensors, None)
            prepared = self._plans.get(key) or self._planned(key, call, plan)
            results = ordinary(prepared, tensors)
        return prepared, key, results

    def _planned(self, key: Any, call: str, make: Callable[[], Prepared]) -> Prepared:
        if self._tie.capturing:
            raise DeviceError(
                f"{call}: a CUDA graph is being captured, and this call is the first of its shapes. "
                "Make it once before the capture, or prepare it by plan()."
            )
        prepared = make()
        self._tie.boards[self.rank].note(prepared.signature, prepared.text)
        self._plans.keep(key, prepared)
        return prepared

    def _run(
        self,
        prepared: Prepared,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        at: list[int],
        to: list[int],
        key: Any,
    ) -> None:
        """`at`, `to`: where inputs and outputs lie."""
        if self._over:
            self._usable(prepared.text)
        if 0 in at or 0 in to:
            check_memory(prepared.text, (*inputs, *outputs), (*at, *to))
        if prepared.in_place:  # these shapes have shared storage before
            offsets = _offsets(at, to)
            prepared = prepared.in_place.get(offsets, prepared)
        tie = self._tie
        bare = tie.bare and not profiler._is_profiler_enabled
        code = tie.end.run(prepared.native, at, to, 0) if bare else self._attend(prepared, inputs, outputs, at, to)
        if code == 0:
            prepared.calls += 1
            self._last = prepared
        elif code == _OVERLAP:
            offsets = _offsets(at, to)
            prepared.in_place[offsets] = self._in_place(prepared, at, to, (key, offsets))
            self._run(prepared, inputs, outputs, at, to, key)
        else:
            raise self._failure(code, prepared)

    def _attend(
        self, prepared: Prepared, inputs: Sequence[Tensor], outputs: Sequence[Tensor], at: list[int], to: list[int]
    ) -> int:
        """Run where a stream or canaries are to be looked after, or somebody watches."""
        tie, lane = self._tie, self._tie.lane
        stream = 0 if lane is None else lane.enter()
        captured = lane is not None and lane.captured
        canaries = None if captured else tie.canaries
        if canaries is not None:
            canaries.feed()
            poison(outputs, inputs)
        if tie.recorder is None and not profiler._is_profiler_enabled:
            code = tie.end.run(prepared.native, at, to, stream)
        else:
            code = self._watched(prepared, at, to, stream, captured=captured)
        prepared.captured |= captured
        if canaries is not None and code == 0:
            canaries.look(prepared.text)
        return code

    def _watched(self, prepared: Prepared, at: list[int], to: list[int], stream: int, *, captured: bool) -> int:
        """Run under a trace or a profiler."""
        tie = self._tie
        with named("purlin ", prepared.text):
            if tie.recorder is None:
                return tie.end.run(prepared.native, at, to, stream)
            return tie.recorder.run(tie.end, prepared, at, to, stream, captured=captured)

    def _in_place(self, prepared: Prepared, at: Sequence[int], to: Sequence[int], apart: Any) -> Prepared:
        """Tensors that share storage: allowed in three forms, each checked once and then a plan of its own."""
        call = prepared.text.partition(" ")[0]
        return self._plans.get(apart) or self._planned(apart, call, partial(in_place, self._tie.site, prepared, at, to))

    def _failure(self, code: int, prepared: Prepared) -> PurlinError:
        if code == _CONCURRENT:
            return ConcurrentUseError(
                f"{prepared.text}: another thread is in a call of this communicator. Take turns, or make one a thread."
            )
        error = self._tie.error(prepared)
        if error is None:
            raise RuntimeError(f"{prepared.text}: the endpoint failed with code {code} and left no fault")
        return error

    def _usable(self, call: str) -> None:
        if self._over:
            raise ClosedError(f"{call}: the communicator {self._over}. Make a new one.")


def _offsets(at: Sequence[int], to: Sequence[int]) -> tuple[int, ...]:
    """How tensors lie, wherever the first does."""
    first = at[0]
    return tuple([address - first for address in (*at, *to)])


def _disown() -> None:
    """A forked child owns none of its parent's communicators: a call of the child would speak with the parent's voice."""
    for communicator in ops.living():
        communicator._over = "belongs to the process that this one was forked from"


os.register_at_fork(after_in_child=_disown)
