"""Who carries out a case: purlin, torch.distributed over NCCL, NCCL with registered symmetric windows, torch's symmetric memory; and, as
yardsticks, ours with equal shares beside uneven ones, torch's own copy of the same bytes and the relayouts that a rival needs beside its collectives.

Every one has buffers of its own, `depth` sets of them in rotation. One that cannot run here raises UnavailableError, which says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases import UNEVEN_SUFFIX, Allocate, Case, Parts, dim_down, fill, make, wrong
from bench.worlds import Force, World
from purlin_core import Communicator

OURS = ("purlin", "purlin_even")
RUNS_AS = "runs as"  # something else than was asked for


class UnavailableError(Exception):
    """Cannot run here; the text says why."""


@dataclass
class Rival:
    """`call(rank, turn)` enqueues one call of that rank on the current stream; `sets[turn % depth][rank]` is what it works on."""

    provider: str
    case: Case
    sets: list[dict[int, Parts]]
    call: Callable[[int, int], object]
    registered: bool = False  # purlin: granted outputs or inputs that are lent; NCCL: windows
    regime: str = ""
    ctas: int | None = None
    checked: bool = True  # its outputs are those of the case

    def fill(self, turn: int) -> None:
        if not self.checked:
            return
        for rank, parts in self.sets[turn].items():
            fill(self.case, parts, rank, turn)

    def refill(self) -> None:
        """Before a timed turn: sums in place are fed their own results."""
        if self.case.reduces and self.case.in_place:
            for each in self.sets:
                for rank, parts in each.items():
                    dim_down(self.case, parts, rank)

    def wrong(self, turn: int) -> str:
        found = (wrong(self.case, parts, rank, turn) for rank, parts in self.sets[turn].items())
        return next(filter(None, found), "")


def sets_of(
    case: Case, world: World, depth: int, inputs: Mapping[int, Allocate], outputs: Mapping[int, Allocate]
) -> list[dict[int, Parts]]:
    return [{rank: make(case, rank, inputs[rank], outputs[rank]) for rank in world.here} for _ in range(depth)]


def ordinary(world: World) -> dict[int, Allocate]:
    """torch.empty on each rank's device."""

    def on(device: torch.device) -> Allocate:
        return lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device=device)

    return {rank: on(world.lane_of(rank).device) for rank in world.here}


# ---- ours ------------------------------------------------------------------------------------------------------------


# By the names that torch has for them, as users of torch call them; all else by its spec.
NAMED: Mapping[str, Callable[[Communicator, Tensor, Tensor, Sequence[int] | None], object]] = {
    "all_gather": lambda comm, out, x, shares: comm.all_gather_into_tensor(out, x, sizes=shares),
    "reduce_scatter": lambda comm, out, x, shares: comm.reduce_scatter_tensor(out, x, sizes=shares),
}


def purlin(case: Case, world: World, depth: int, *, granted: bool, force: Force | None = None) -> Rival:
    """`granted`: what a direct call needs there lies in comm.empty(). The schedule on record is that of the first step."""
    comms = world.communicators(force)
    plain = ordinary(world)
    heaps: dict[int, Allocate] = {rank: comm.empty for rank, comm in comms.items()} if granted else plain
    sets = sets_of(case, world, depth, *((heaps, plain) if case.lends_inputs else (plain, heaps)))
    steps = [(step.spec, step.sizes) for step in case.steps]
    named, shares = NAMED.get(case.collective.removesuffix(UNEVEN_SUFFIX)), case.steps[0].shares or None

    def limit(rank: int) -> AbstractContextManager[None]:
        return force.limit(comms[rank]) if force is not None else nullcontext()

    def call(rank: int, turn: int) -> None:
        for (spec, sizes), (given, outs) in zip(steps, sets[turn % depth][rank], strict=True):
            with limit(rank):
                if named is None:
                    comms[rank].exchange(given, spec, sizes=sizes, out=outs)
                else:
                    named(comms[rank], outs[0], given[0], shares)

    rank = world.here[0]
    given, outs = sets[0][rank][0]
    with world.lane_of(rank).current(), limit(rank):
        schedule = comms[rank].plan(given, steps[0][0], sizes=steps[0][1], out=outs).schedule
    if force is not None and (schedule.regime, schedule.teams) != (force.regime, force.teams):
        raise UnavailableError(f"{RUNS_AS} {schedule.regime.name.lower()} by {schedule.teams}: {schedule.why}")
    regime = schedule.regime.name.lower()
    return Rival("purlin", case, sets, call, granted, regime, schedule.ctas)


def purlin_even(case: Case, world: World, depth: int, *, granted: bool) -> Rival:
    """Ours on the even case beside an uneven one."""
    if not case.uneven:
        raise UnavailableError("its shares are equal")
    return replace(purlin(case.even, world, depth, granted=granted), provider="purlin_even")


# ---- NCCL ------------------------------------------------------------------------------------------------------------


def nccl(case: Case, world: World, depth: int) -> Rival:
    _needs_processes(world)
    _needs_nccl_call(case)
    plain = ordinary(world)
    return _by_nccl("nccl", case, sets_of(case, world, depth, plain, plain), registered=False)


def nccl_symmetric(case: Case, world: World, depth: int) -> Rival:
    """Inputs and outputs in memory of ncclMemAlloc, registered as symmetric windows."""
    _needs_processes(world)
    _needs_nccl_call(case)
    if not _by_one_call(case.collective):
        raise UnavailableError("its permutes write to ordinary memory")
    room = dict.fromkeys(world.here, _Carver(_window(world)).take)
    return _by_nccl("nccl_symmetric", case, sets_of(case, world, depth, room, room), registered=True)


def _window(world: World) -> Tensor:
    """Bytes of a registered window, made once: registering is a collective of all ranks."""
    if world.window is None:
        device = world.lanes[0].device
        backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
        try:
            world.pool = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(world.pool, device=device):
                window = torch.empty(world.window_bytes, dtype=torch.uint8, device=device)
            backend.register_mem_pool(world.pool, symm=True)
        except (AttributeError, TypeError, RuntimeError) as error:
            raise UnavailableError(f"no registered windows with torch {torch.__version__}: {_line(error)}") from error
        world.window = window
    return world.window


class _Carver:
    """Tensors one after the other in a piece of memory."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.at = memory, 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = torch.Size(tuple(shape)).numel() * dtype.itemsize
        at, self.at = self.at, self.at + -(-size // 256) * 256
        if self.at > self.memory.numel():
            raise UnavailableError(f"needs more than {self.memory.numel()} bytes of window")
        return self.memory[at : at + size].view(dtype).view(tuple(shape))


def _by_nccl(provider: str, case: Case, sets: list[dict[int, Parts]], *, registered: bool) -> Rival:
    carries: dict[str, Callable[[Parts, int], None]] = {
        "all_gather": _gather,
        "reduce_scatter": _scatter,
        "all_reduce": _reduce,
        "all_to_all": _to_all,
        "all_to_all_v": partial(_to_all_v, shares=case.steps[0].shares),
    }
    carry = carries.get(case.collective, _kv if "qkv" not in case.collective else _qkv_o)

    def call(rank: int, turn: int) -> None:
        carry(sets[turn % len(sets)][rank], case.ranks)

    return Rival(provider, case, sets, call, registered)


def _needs_nccl_call(case: Case) -> None:
    if case.collective == "all_reduce" and not case.in_place:
        raise UnavailableError("torch.distributed reduces in place only")
    if case.uneven and case.collective != "all_to_all_v":
        raise UnavailableError(
            "NCCL has it for equal shares only: torch.distributed makes several calls of uneven ones"
        )


def _by_one_call(name: str) -> bool:
    return not name.startswith("flux")


def _single(*names: str) -> Callable[..., object]:
    """torch 2.13 gave some collectives new names, and warns of the old ones."""
    found: Callable[..., object] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return found


_all_gather = _single("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _single("reduce_scatter_single", "reduce_scatter_tensor")


def _gather(parts: Parts, ranks: int) -> None:
    ((x,), (out,)) = parts[0]
    _all_gather(out, x)


def _scatter(parts: Parts, ranks: int) -> None:
    ((x,), (out,)) = parts[0]
    _reduce_scatter(out, x)


def _reduce(parts: Parts, ranks: int) -> None:
    dist.all_reduce(parts[0][0][0])


def _to_all(parts: Parts, ranks: int) -> None:
    ((x,), (out,)) = parts[0]
    dist.all_to_all_single(out, x.view_as(out))


def _to_all_v(parts: Parts, ranks: int, *, shares: Sequence[int]) -> None:
    """Of one row a rank: shares[d] elements go to rank d, and as many as its own come from each."""
    ((x,), (out,)) = parts[0]
    dist.all_to_all_single(out.view(-1), x.view(-1), [out.shape[1]] * ranks, list(shares))


def _kv(parts: Parts, ranks: int) -> None:
    """Of one batch the gathered shards lie in order; strided ones are made contiguous first."""
    for x, out in zip(*parts[0], strict=True):
        _all_gather(out.squeeze(0), x.contiguous().squeeze(0))


def _qkv_o(parts: Parts, ranks: int) -> None:
    """As diffusers' ulysses does it: a permute before each all-to-all, one after the way back; to_heads() and from_heads() say which."""
    for x, out in zip(*parts[0], strict=True):
        sent = to_heads(x, ranks)
        dist.all_to_all_single(out.view(sent.shape), sent)
    (o,), (out,) = parts[1]
    came = torch.empty((ranks, o.shape[1] // ranks, *o.shape[2:]), dtype=o.dtype, device=o.device)
    dist.all_to_all_single(came, o.view(came.shape))
    out.view(out.shape[1], ranks, *came.shape[2:]).copy_(came.transpose(0, 1))


def to_heads(x: Tensor, ranks: int) -> Tensor:
    """(1, tokens, heads, dim) -> (ranks, tokens, heads / ranks, dim), contiguous: what goes to each rank lies together."""
    _, tokens, heads, dim = x.shape
    return x.reshape(tokens, ranks, heads // ranks, dim).transpose(0, 1).contiguous()


# ---- torch's symmetric memory ----------------------------------------------------------------------------------------

SYMMETRIC_SETS = 8  # each tensor is a rendezvous of its own


def torch_symm_mem(case: Case, world: World, depth: int, *, shots: str) -> Rival:
    """`shots`: "one" or "two". One-shot writes a tensor of its own making, two-shot works in place."""
    _needs_processes(world)
    if case.collective != "all_reduce" or case.in_place != (shots == "two"):
        raise UnavailableError("torch has all-reduces only: one-shot out of place, two-shot in place")
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD
    name: Any = group.group_name  # type: ignore[union-attr]
    device = world.lanes[0].device

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        x = symmetric.empty(*shape, dtype=dtype, device=device)
        symmetric.rendezvous(x, name)
        return x

    alike = dict.fromkeys(world.here, allocate)
    outputs = alike if case.in_place else ordinary(world)
    sets = sets_of(case, world, min(depth, SYMMETRIC_SETS), alike, outputs)
    ops = torch.ops.symm_mem

    def one(rank: int, turn: int) -> None:
        ((x,), (out,)) = sets[turn % len(sets)][rank][0]
        ops.one_shot_all_reduce_out(x, "sum", name, out)

    def two(rank: int, turn: int) -> None:
        ops.two_shot_all_reduce_(sets[turn % len(sets)][rank][0][0][0], "sum", name)

    return Rival("torch_symm_mem", case, sets, one if shots == "one" else two, True, f"{shots}_shot")


# ---- yardsticks, on one device ---------------------------------------------------------------------------------------


def torch_copy(case: Case, world: World, depth: int) -> Rival:
    """One copy of the bytes that all ranks must move."""
    _needs_one_device(world)
    device, (first, *_) = world.lanes[0].device, world.here
    total = sum(map(case.copied_bytes, range(case.ranks)))
    pairs = [[torch.empty(total, dtype=torch.uint8, device=device).random_() for _ in range(2)] for _ in range(depth)]

    def call(rank: int, turn: int) -> None:
        if rank == first:
            x, out = pairs[turn % depth]
            out.copy_(x)

    return Rival("torch_copy", case, [{} for _ in pairs], call, checked=False)


def purlin_copy(case: Case, world: World, depth: int) -> Rival:
    """Every rank copies the bytes it must move, by our own kernel: nothing is sent."""
    _needs_one_device(world)
    comms = world.communicators()
    device = world.lanes[0].device

    def pair_of(rank: int) -> list[Tensor]:
        numel = max(case.copied_bytes(rank), 1)
        return [torch.empty(numel, dtype=torch.uint8, device=device).random_() for _ in range(2)]

    pairs = [{rank: pair_of(rank) for rank in world.here} for _ in range(depth)]

    def call(rank: int, turn: int) -> None:
        x, out = pairs[turn % depth][rank]
        comms[rank].redistribute(x, "n -> n", out=out)

    return Rival("purlin_copy", case, [{} for _ in pairs], call, checked=False)


def torch_relayout(case: Case, world: World, depth: int) -> Rival:
    """What a rival needs beside its collectives: each rank's tensors made ready to be sent, and what comes back put in order."""
    _needs_one_device(world)
    if _by_one_call(case.collective) or not ("qkv" in case.collective or "strided" in case.collective):
        raise UnavailableError("needs no relayout")
    plain = ordinary(world)
    sets = sets_of(case, world, depth, plain, plain)
    for each in sets:
        for rank, parts in each.items():
            fill(case, parts, rank, 0)

    def call(rank: int, turn: int) -> None:
        parts = sets[turn % depth][rank]
        if "qkv" not in case.collective:
            for x in parts[0][0]:
                x.contiguous()
            return
        for x in parts[0][0]:
            to_heads(x, case.ranks)
        (o,), (out,) = parts[1]
        came = o.view(case.ranks, o.shape[1] // case.ranks, *o.shape[2:])
        out.view(out.shape[1], case.ranks, *came.shape[2:]).copy_(came.transpose(0, 1))

    return Rival("torch_relayout", case, sets, call, checked=False)


def _needs_processes(world: World) -> None:
    if world.name != "processes":
        raise UnavailableError("needs a process and a GPU for each rank")


def _needs_one_device(world: World) -> None:
    if len({lane.device for lane in world.lanes}) > 1 or world.name != "local":
        raise UnavailableError("a yardstick where all ranks are on one device")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]
