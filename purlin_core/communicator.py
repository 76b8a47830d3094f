"""A communicator: ranks that exchange tensors by specs, with the names and argument order of torch.distributed where it has them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from purlin_core import ops
from purlin_core.arguments import check_halo, check_sequence, check_types
from purlin_core.canary import poison
from purlin_core.connection import Connection
from purlin_core.errors import ClosedError, ConcurrentUseError, DeviceError, PurlinError, SetupError, ShapeError
from purlin_core.memory import address_of
from purlin_core.plan import FrozenSizes, freeze_sizes
from purlin_core.prepare import Asked, Prepared, in_place, prepare, prepare_all_to_all
from purlin_core.rendezvous import Rendezvous, StoreRendezvous, of_group
from purlin_core.settings import Settings
from purlin_core.spec import Op, Sizes
from purlin_core.tune import Scratch, cpu_scratch, most_teams

MAX_RANKS = 16
MOST_PLANS = 4096  # kept; a plan takes a few KiB
_OVERLAP, _CONCURRENT = 16, 17  # Outcome in csrc/purlin/endpoint.hpp


@dataclass(frozen=True)
class Stats:
    """What this rank did since its communicator was made. Bytes are payload: neither padding nor tags."""

    calls: int
    sent_bytes: int
    received_bytes: int
    regimes: Mapping[str, int]  # calls in each
    scratch_bytes: int  # of this rank's inbox, heap not counted
    heap_bytes: int


class Communicator:
    """The ranks of one group, and this process's (or thread's) place among them.

    `group`: a torch process group, a device mesh of one dim, None for the default group; or a torch Store together with `rank` and `ranks`.
    `timeout`: seconds a call waits for a peer before it fails with StallError on every rank. `setup_timeout`: the same for making the communicator.
    `heap_bytes`: room for empty(), the same on every rank. `teams`: workers a call is dealt to (on the CPU one thread does the work of all).
    `scratch`: other sizes of the inbox than DESIGN's, `teams` among them; they decide which regime a call takes.
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
        teams: int = 1,
        scratch: Scratch | None = None,
    ) -> None:
        self.device = _device(device)
        if self.device.type != "cpu":
            raise DeviceError(
                f"Communicator: `device` needs to be 'cpu'; got '{self.device}'. There is no CUDA Atom in this version."
            )
        if not (_seconds(timeout) and _seconds(setup_timeout) and isinstance(heap_bytes, int) and heap_bytes >= 0):
            came = f"timeout={timeout!r}, setup_timeout={setup_timeout!r}, heap_bytes={heap_bytes!r}"
            raise SetupError(f"Communicator: needs positive timeouts in seconds and heap_bytes >= 0; got {came}.")
        meeting = _meeting(group, rank, ranks)
        if meeting.ranks > MAX_RANKS:
            raise SetupError(
                f"Communicator: needs at most {MAX_RANKS} ranks; got {meeting.ranks}. Put more on an outer mesh axis."
            )
        if not 1 <= teams <= most_teams(meeting.ranks):
            needed = f"1 to {most_teams(meeting.ranks)} `teams` with {meeting.ranks} ranks"
            raise SetupError(f"Communicator: needs {needed}; got {teams}.")
        self.rank, self.ranks = meeting.rank, meeting.ranks
        self._marks = (
            torch.zeros(self.ranks, dtype=torch.uint8),
            torch.zeros(1, dtype=torch.uint8),
        )  # what barrier() moves
        self._settings = Settings.from_environment()
        self._terms = {"timeout": float(timeout), "setup_timeout": float(setup_timeout)}
        self._meeting = meeting
        self._scratch = scratch or cpu_scratch(self.ranks, teams=teams)
        self._before = Stats(0, 0, 0, {}, 0, 0)  # of connections that reserve() replaced
        self._open(heap_bytes)
        self.id = ops.register(self)

    def _open(self, heap_bytes: int) -> None:
        self._tie = Connection(self._meeting, self._scratch, self._settings, heap_bytes=heap_bytes, **self._terms)
        self._plans: dict[Any, Prepared] = {}
        self._last: Prepared | None = None
        self._over = ""  # why there are no more calls

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
            check_types(call, tensors, out, specs, sizes)
            raise

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        """`x` (n, ...) of every rank, in rank order -> `out` (ranks * n, ...) or (ranks, n, ...). `sizes`: rows a rank, where they differ."""
        return self._into("all_gather_into_tensor", out, x, sizes=sizes)

    def reduce_scatter_tensor(
        self, out: Tensor, x: Tensor, op: Op = "sum", *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """`x` (ranks * n, ...) reduced over the ranks -> my rows of it, `out` (n, ...). `sizes`: rows a rank, where they differ."""
        return self._into("reduce_scatter_tensor", out, x, sizes=sizes, op=op)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Tensor:
        """`x` reduced over the ranks, in place."""
        return self._into("all_reduce", x, x, op=op)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None = None, in_sizes: Sequence[int] | None = None
    ) -> Tensor:
        """in_sizes[d] rows of `x` go to rank d; out_sizes[s] rows of `out` come from rank s, in rank order. None for both: equal shares."""
        if out_sizes is None and in_sizes is None:
            return self._into("all_to_all_single", out, x)
        shares = tuple(None if sizes is None else tuple(sizes) for sizes in (out_sizes, in_sizes))
        key = ("all_to_all_single", shares, _facts(x), _facts(out))
        prepared = self._plans.get(key)
        if prepared is None:
            asked = Asked("all_to_all_single", "", (), "sum", "", self.device, granted=False)
            prepared = self._planned(key, prepare_all_to_all(self._tie.site, asked, x, out, *shares))
        self._run(prepared, (x,), (out,), [x.data_ptr()], [out.data_ptr()], key)
        return out

    def halo(
        self, x: Tensor, dim: int, rows: int | tuple[int, int], *, sizes: Sequence[int] | None = None, tag: str = ""
    ) -> Tensor:
        """`x`, my rows of dim `dim` -> the same with `rows` more from each neighbour, or (before, after); none beyond the first and the last rank."""
        check_halo(dim, rows)
        before, after = (rows, rows) if isinstance(rows, int) else rows
        if not -x.ndim <= dim < x.ndim or min(before, after) < 0:
            raise ShapeError(f"halo: needs `dim` among {x.ndim} dims and `rows` >= 0; got dim={dim}, rows={rows}.")
        names = [f"d{i}" for i in range(x.ndim)]
        left, right, name = list(names), list(names), names[dim]
        left[dim], right[dim] = f"{name}@", f"{name}@~{before}:{after}"
        spec = f"{' '.join(left)} -> {' '.join(right)}"
        return self.exchange([x], spec, sizes=_rows(name, sizes), tag=tag, call="halo")[0]

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._into("barrier", *self._marks)

    # ---- memory and what is known of calls

    def empty(self, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that can be granted: passed as `out` by every rank, peers write an exchange's result straight into it. Freeing is local.

        Raises ShapeError when the heap has no room (`heap_bytes`, reserve()).
        """
        self._usable("empty")
        return self._tie.heap.empty((shape,) if isinstance(shape, int) else shape, dtype)

    def reserve(self, heap_bytes: int) -> None:
        """Collective: give every rank a new heap of `heap_bytes` for empty(). Tensors of the old one stay valid, but are ordinary from now on."""
        self._usable("reserve")
        self._tie.gather(None)  # nobody is still in a call
        self._before = self.stats()
        old = self._tie
        self._open(heap_bytes)
        old.part()

    def plan(
        self,
        tensors: Sequence[Tensor],
        specs: str | Sequence[str],
        *,
        sizes: Sizes | None = None,
        op: Op = "sum",
        out: Sequence[Tensor] | None = None,
    ) -> Prepared:
        """What exchange() would run for these tensors; `.explain()` says it in words. Nothing is sent."""
        specs = specs if isinstance(specs, str) else tuple(specs)
        granted = out is not None and self._tie.heap.holds_all(out)
        return prepare(
            self._tie.site, Asked("exchange", specs, freeze_sizes(sizes), op, "", self.device, granted), tensors, out
        )

    def stats(self) -> Stats:
        """Calls and bytes of this rank so far."""
        plans, before, geometry = self._plans.values(), self._before, self._tie.site.geometry
        regimes = dict(before.regimes)
        for plan in plans:
            name = plan.schedule.regime.name.lower()
            regimes[name] = regimes.get(name, 0) + plan.calls
        return Stats(
            calls=before.calls + sum(plan.calls for plan in plans),
            sent_bytes=before.sent_bytes + sum(plan.calls * plan.sent_bytes for plan in plans),
            received_bytes=before.received_bytes + sum(plan.calls * plan.received_bytes for plan in plans),
            regimes=regimes,
            scratch_bytes=geometry.arena_bytes - geometry.heap_bytes,
            heap_bytes=geometry.heap_bytes,
        )

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

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one call

    def _into(self, call: str, out: Tensor, x: Tensor, *, sizes: Sequence[int] | None = None, op: Op = "sum") -> Tensor:
        """A collective of torch's: its spec follows from its name and the dims of `x`. The shortest way, for it is the latency of small calls."""
        if torch.compiler.is_dynamo_compiling():
            spec, shaped, into = _as_spec(call, x, out, self.ranks)
            ops.exchange(self.id, [shaped], spec, sizes=_rows("d0", sizes), op=op, out=[into], tag="")
            return out
        try:
            return self._into_now(call, out, x, sizes, op)
        except (AttributeError, TypeError):
            check_types(call, [x], [out], "", _rows("d0", sizes))
            raise

    def _into_now(self, call: str, out: Tensor, x: Tensor, sizes: Sequence[int] | None, op: Op) -> Tensor:
        to, heap = address_of(out), self._tie.heap
        rows = None if sizes is None else tuple(sizes)
        key = (call, op, rows, heap.lo <= to < heap.hi, out is x, _facts(x), _facts(out))
        prepared = self._plans.get(key)
        if prepared is None:
            spec, shaped, into = _as_spec(call, x, out, self.ranks)
            asked = Asked(call, spec, freeze_sizes(_rows("d0", sizes)), op, "", self.device, heap.holds_all([out]))
            prepared = prepare(self._tie.site, asked, [shaped], [into])
            if out is x:
                prepared = in_place(self._tie.site, prepared, [to], [to])
            self._planned(key, prepared)
        self._run(prepared, (x,), (out,), [x.data_ptr()], [to], key)
        return out

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
        granted = out is not None and self._tie.heap.holds_all(out)
        wanted = None if out is None else tuple(map(_facts, out))
        key = (call, specs, sizes, op, tag, granted, tuple(map(_facts, tensors)), wanted)
        prepared = self._plans.get(key)
        if prepared is None:
            asked = Asked(call, specs, sizes, op, tag, self.device, granted)
            prepared = self._planned(key, prepare(self._tie.site, asked, tensors, out))
        if out is None:
            out = [torch.empty(shape, dtype=x.dtype) for shape, x in zip(prepared.out_shapes, tensors, strict=True)]
        self._run(prepared, tensors, out, [x.data_ptr() for x in tensors], [address_of(o) for o in out], key)
        return list(out)

    def _planned(self, key: Any, prepared: Prepared) -> Prepared:
        self._tie.boards[self.rank].note(prepared.signature, prepared.text)
        if len(self._plans) >= MOST_PLANS:  # a stream of ever new shapes: begin anew
            self._before = self.stats()
            self._plans.clear()
        self._plans[key] = prepared
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
        tie = self._tie
        if tie.canaries is not None:
            tie.canaries.feed()
            poison(outputs, inputs)
        code = tie.end.run(prepared.native, at, to, 0)
        if code == 0:
            prepared.calls += 1
            self._last = prepared
            if tie.canaries is not None:
                tie.canaries.look(prepared.text)
        elif code == _OVERLAP:
            apart = (key, tuple(address - at[0] for address in (*at, *to)))
            self._run(self._in_place(prepared, at, to, apart), inputs, outputs, at, to, apart)
        else:
            raise self._failure(code, prepared)

    def _in_place(self, prepared: Prepared, at: Sequence[int], to: Sequence[int], apart: Any) -> Prepared:
        """Tensors that share storage: allowed in three forms, each checked once and then a plan of its own."""
        allowed = self._plans.get(apart)
        return allowed or self._planned(apart, in_place(self._tie.site, prepared, at, to))

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


def _disown() -> None:
    """A forked child owns none of its parent's communicators: a call of the child would speak with the parent's voice."""
    for communicator in ops.living():
        communicator._over = "belongs to the process that this one was forked from"


os.register_at_fork(after_in_child=_disown)


def _meeting(group: Any, rank: int | None, ranks: int | None) -> Rendezvous:
    if isinstance(group, Store):
        if rank is None or ranks is None or not 0 <= rank < ranks:
            raise SetupError(
                f"Communicator: a Store needs `rank` and `ranks` with 0 <= rank < ranks; got rank={rank}, ranks={ranks}."
            )
        return StoreRendezvous(group, rank, ranks)
    if rank is not None or ranks is not None:
        raise SetupError("Communicator: `rank` and `ranks` go with a Store only; a group knows them.")
    return group if isinstance(group, Rendezvous) else of_group(group)


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"Communicator: `device` needs to be a torch device; got {device!r}.") from error


def _seconds(timeout: object) -> bool:
    return isinstance(timeout, int | float) and 0 < timeout < float("inf")


def _facts(x: Tensor) -> tuple[Any, ...]:
    """All of a tensor that a plan depends on."""
    try:
        return x.shape, x.stride(), x.dtype, x.device, x.requires_grad and torch.is_grad_enabled()
    except RuntimeError:  # some sparse tensors have no strides: planning refuses them by name
        return (x.layout,)


def _as_spec(call: str, x: Tensor, out: Tensor, ranks: int) -> tuple[str, Tensor, Tensor]:
    """A collective of torch's names as spec, input and output; these are views, at the same addresses."""
    if call == "all_to_all_single":
        return _all_to_all(x, out, ranks)
    if call == "all_gather_into_tensor" and out.ndim == x.ndim + 1:
        x = x.unsqueeze(0)
    if call == "all_reduce" and x.ndim == 0:
        x, out = x.view(1), out.view(1)
    if x.ndim == 0:
        raise ShapeError(f"{call}: `x` needs at least one dim; got a scalar. Pass x.view(1).")
    rest = "".join(f" d{i}" for i in range(1, x.ndim))
    specs = {
        "all_gather_into_tensor": f"d0@{rest} -> d0{rest}",
        "reduce_scatter_tensor": f"+d0{rest} -> d0@{rest}",
        "all_reduce": f"+d0{rest} -> d0{rest}",
        "barrier": "d0@ -> d0",
    }
    return specs[call], x, out


def _all_to_all(x: Tensor, out: Tensor, ranks: int) -> tuple[str, Tensor, Tensor]:
    """With equal shares: dim 0 is two, the source and its rows on the left, the reader and its rows on the right."""
    if x.ndim == 0 or out.shape != x.shape or x.shape[0] % ranks:
        needed = f"`x` and `out` of one shape, dim 0 divisible by {ranks} ranks"
        came = f"{_rows_of(x)} and {_rows_of(out)}"
        raise ShapeError(
            f"all_to_all_single: needs {needed}; got {came}. Pass in_sizes and out_sizes for uneven shares."
        )
    rest = "".join(f" d{i}" for i in range(2, x.ndim + 2))
    rows = (ranks, x.shape[0] // ranks)
    return f"d0@ d1{rest} -> d0 d1@{rest}", _split(x, rows).unsqueeze(0), _split(out, rows).unsqueeze(1)


def _rows_of(x: Tensor) -> str:
    return f"{x.shape[0]} rows of {tuple(x.shape[1:])}" if x.ndim else "a scalar"


def _split(x: Tensor, rows: tuple[int, int]) -> Tensor:
    """Dim 0 as two dims; a view whatever the strides."""
    return x.as_strided((*rows, *x.shape[1:]), (x.stride(0) * rows[1], *x.stride()))


def _rows(name: str, sizes: Sequence[int] | None) -> Sizes | None:
    return None if sizes is None else {name: sizes}
