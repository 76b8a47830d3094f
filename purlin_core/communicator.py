"""A communicator: ranks that exchange tensors by specs, with the names and argument order of torch.distributed where it has them.

What its calls are stands in calls.py, torch_names.py and exchange.py; how it begins and ends in opening.py and life.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from purlin_core import ops
from purlin_core.arguments import check_budget, check_empty, check_heap_bytes, check_sequence, check_types
from purlin_core.collectives import halo_spec, rows_of
from purlin_core.errors import INPUT_ERRORS
from purlin_core.exchange import exchange, plan
from purlin_core.life import Life
from purlin_core.opening import Opening
from purlin_core.plan import freeze_sizes
from purlin_core.plans import Stats
from purlin_core.prepare import Prepared
from purlin_core.recorder import Recorder
from purlin_core.spec import Op, Sizes
from purlin_core.torch_names import all_to_all, into
from purlin_core.trace import joined
from purlin_core.tune import Scratch, Tuning


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
        opening = Opening.of(
            group,
            device,
            rank=rank,
            ranks=ranks,
            timeout=timeout,
            setup_timeout=setup_timeout,
            heap_bytes=heap_bytes,
            teams=teams,
            scratch=scratch,
            tuning=tuning,
        )
        self.device = opening.atom.device
        self.rank, self.ranks = opening.meeting.rank, opening.meeting.ranks
        # what barrier() moves
        self._marks = tuple(torch.zeros(n, dtype=torch.uint8, device=self.device) for n in (self.ranks, 1))
        self._life = Life(opening, heap_bytes, granted_results=bool(granted_results))
        self._calls = self._life.calls
        self.id = self._calls.id = ops.register(self)
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
        try:
            check_sequence(call, tensors)
            texts = specs if isinstance(specs, str) else tuple(specs)
            return exchange(self._calls, call, tensors, out, texts, freeze_sizes(sizes) if sizes else (), op, tag)
        except (AttributeError, TypeError, ValueError) as error:
            self._calls.refuse(error, partial(check_types, call, tensors, out, specs, sizes, op=op, tag=tag))

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        """`x` (n, ...) of every rank, in rank order -> `out` (ranks * n, ...) or (ranks, n, ...). `sizes`: rows a rank, where they differ."""
        return into(self._calls, "all_gather_into_tensor", out, x, sizes, "sum")

    def reduce_scatter_tensor(
        self, out: Tensor, x: Tensor, op: Op = "sum", *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """`x` (ranks * n, ...) reduced over the ranks -> my rows of it, `out` (n, ...). `sizes`: rows a rank, where they differ.

        Large ones are fastest where every rank's `x` is a tensor of empty().
        """
        return into(self._calls, "reduce_scatter_tensor", out, x, sizes, op)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Tensor:
        """`x` reduced over the ranks, in place. Large ones are fastest where every rank's `x` is a tensor of empty()."""
        return into(self._calls, "all_reduce", x, x, None, op)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None = None, in_sizes: Sequence[int] | None = None
    ) -> Tensor:
        """in_sizes[d] rows of `x` go to rank d; out_sizes[s] rows of `out` come from rank s, in rank order. None for both: equal shares."""
        if out_sizes is None and in_sizes is None:
            return into(self._calls, "all_to_all_single", out, x, None, "sum")
        return all_to_all(self._calls, out, x, out_sizes, in_sizes)

    def halo(
        self, x: Tensor, dim: int, rows: int | tuple[int, int], *, sizes: Sequence[int] | None = None, tag: str = ""
    ) -> Tensor:
        """`x`, my rows of dim `dim` -> the same with `rows` more from each neighbour, or (before, after); none beyond the first and the last rank."""
        try:
            check_types("halo", [x], None, "", None)
            spec, name = halo_spec(x, dim, rows)
        except INPUT_ERRORS as error:
            self._calls.refuse(error)
        return self.exchange([x], spec, sizes=rows_of(name, sizes), tag=tag, call="halo")[0]

    def barrier(self) -> None:
        """Return when every rank has called it. On a GPU the stream waits for that, not the host."""
        out, x = self._marks
        into(self._calls, "barrier", out, x, None, "sum")

    @contextmanager
    def budget(self, blocks: int) -> Iterator[None]:
        """Calls (and plans) inside take at most `blocks` blocks of a GPU each, the same on every rank, and leave the rest to what runs beside them.

        One of the largest needs 8 to 16 for most of what the link gives. On the CPU nothing changes. Raises ShapeError unless `blocks` is 1 or more.
        """
        check_budget(blocks)
        calls = self._calls
        before, calls.budget = calls.budget, blocks
        try:
            yield
        finally:
            calls.budget = before

    # ---- memory and what is known of calls

    def empty(self, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that peers can reach: passed as `out` by every rank, they write an exchange's result straight into it.

        In an all-reduce they read it there, too; of a reduce-scatter they read its input where that is such a tensor. Freeing is local.
        On a GPU the memory of one that is freed is given to the next at once: let streams that use such tensors wait for one another.
        Raises ShapeError when the heap has no room (`heap_bytes`, reserve()).
        """
        self._calls.check_usable("empty")
        check_empty(shape, dtype)
        return self._calls.tie.heap.empty((shape,) if isinstance(shape, int) else shape, dtype)

    def reserve(self, heap_bytes: int) -> None:
        """Collective: give every rank a new heap of `heap_bytes` for empty(). Tensors of the old one stay valid, but are ordinary from now on."""
        self._calls.check_usable("reserve")
        check_heap_bytes("reserve", heap_bytes)
        self._life.reserve(heap_bytes)
        joined(self)

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
        self._calls.check_usable("plan")
        check_sequence("plan", tensors)
        check_types("plan", tensors, out, specs, sizes, op=op, tag=tag)
        texts = specs if isinstance(specs, str) else tuple(specs)
        return plan(self._calls, call, tensors, out, texts, freeze_sizes(sizes), op, tag)

    def stats(self) -> Stats:
        """Calls and bytes of this rank so far."""
        return self._calls.stats()

    @property
    def captured_together(self) -> bool:
        """Whether its calls can go into a CUDA graph only while those of its peers do: ranks are threads that launch together, or share a GPU."""
        return self._life.captured_together

    def recorded(self, most: int) -> Recorder | None:
        """For trace(): write down what calls do from now on. None where there are no more, or they are being written down."""
        return self._life.recorded(most)

    # ---- health

    def check(self) -> None:
        """Raise the error that killed this communicator, if one did."""
        self._calls.check_usable("check")
        self._life.check()

    def abort(self, reason: str) -> None:
        """Make the pending or next call of every rank raise PeerError with this reason. The communicator is dead from then on."""
        self._life.abort(reason)

    def guard(self) -> AbstractContextManager[None]:
        """An exception inside becomes a PeerError on the other ranks at once, not a stall at their deadline."""
        return self._life.guard()

    def close(self) -> None:
        """Part from the peers, waiting up to 5 s for them, and give the memory back. Idempotent; later calls raise ClosedError.

        One that is dropped unclosed may keep memory of a GPU until another is made or closed, or none of the process is left; what a kernel still
        uses 2 s later is kept for good.
        """
        self._life.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
