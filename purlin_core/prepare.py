"""From tensors and a spec to what the native endpoint runs: moves, a schedule, signatures. Done once per signature of a call, then cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from purlin_core import _cpu
from purlin_core.alias import Memory, check_alias
from purlin_core.atom import Atom
from purlin_core.errors import DeviceError, DtypeError, ShapeError
from purlin_core.explain import explain, explain_moves
from purlin_core.moves import Kind, Moves
from purlin_core.native import plan_arguments, remote_routes
from purlin_core.plan import (
    AllReduce,
    FrozenSizes,
    Operand,
    all_to_all_moves,
    contiguous,
    largest_message,
    output_shape,
    plan_moves,
    received_bytes,
    sent_bytes,
)
from purlin_core.reference import check_op, check_reducible
from purlin_core.spec import Op, Spec, check_sizes
from purlin_core.tune import (
    IN_PLACE_PARTS_TEAM_BYTES,
    Regime,
    Schedule,
    Scratch,
    Tuning,
    choose,
    copying_roles,
    how_all_reduce,
    with_parts,
)

# end the text of a call
GRANTED = ", into granted outputs"  # peers write them
LENT = ", of inputs that are lent"  # peers read them
MAX_GRANTS, MAX_TENSORS = 4, 16  # csrc/purlin/moves.hpp


@dataclass(frozen=True)
class Site:
    """The communicator a call is prepared for."""

    rank: int
    ranks: int
    scratch: Scratch
    geometry: _cpu.Geometry  # or _cuda's, which has the same names
    atom: Atom
    tuning: Tuning
    blocks: int  # of a GPU that one call may take

    def plan(self, arguments: Mapping[str, Any]) -> _cpu.Plan:
        """The native plan. On a GPU it may put boxes into device memory, which cannot be done during a capture."""
        with self.atom.current():
            plan: _cpu.Plan = self.atom.native.Plan(self.geometry, **arguments)
        return plan

    def within(self, budget: int) -> Site:
        """The same with as many blocks a call. 0, or no GPU: as it is."""
        if not budget or not self.tuning.gpu:
            return self
        return replace(
            self, blocks=min(self.blocks, budget), scratch=replace(self.scratch, teams=min(self.scratch.teams, budget))
        )


@dataclass(frozen=True)
class Asked:
    """What a call asks for beside its tensors."""

    call: str  # how texts call it
    specs: str | tuple[str, ...]
    sizes: FrozenSizes
    op: Op
    tag: str
    device: torch.device
    granted: bool  # the outputs lie in the heap
    lent: bool = False  # the inputs do
    budget: int = 0  # blocks of a GPU that the call may take; 0: as many as tuning likes


@dataclass
class Prepared:
    """A call ready to run on any tensors of its shapes. `calls` counts how often it did."""

    native: _cpu.Plan
    arguments: Mapping[str, Any]  # that `native` was made of
    moves: Moves
    schedule: Schedule
    operands: tuple[Operand, ...]  # none of an all_to_all_single with sizes
    inputs: tuple[Memory, ...]  # how they lie, wherever that is
    outputs: tuple[Memory, ...]
    text: str
    signature: int
    sent_bytes: int  # payload of this rank on the wire, a call
    received_bytes: int
    overlapping: bool = False  # an input and an output share storage, in an allowed form
    calls: int = 0
    in_place: dict[tuple[int, ...], Prepared] = field(default_factory=dict)  # by where tensors lie from the first
    captured: bool = False  # a CUDA graph holds a call of it, and what `native` keeps in device memory

    @cached_property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(out.shape for out in self.outputs)

    def explain(self) -> str:
        """Moves, bytes with their formula, regime, teams, and why."""
        schedule = self.schedule
        blocks = f" of {schedule.parts} blocks" if schedule.parts > 1 else ""
        how = f"{schedule.regime.name.lower()}, {schedule.teams} team(s){blocks}, lag {schedule.lag}, {self.native.steps} step(s): {schedule.why}"
        moves = explain(self.operands, self.moves) if self.operands else explain_moves(self.moves)
        return f"{self.text}\n{how}\n{moves}"


def prepare(site: Site, asked: Asked, tensors: Sequence[Tensor], out: Sequence[Tensor] | None) -> Prepared:
    """Plan a call of specs. Raises SpecError, ShapeError, DtypeError, DeviceError, AliasError; touches no channel."""
    site = site.within(asked.budget)
    operands, inputs, outputs = _operands(site, asked, tensors, out)
    moves = plan_moves(operands, site.rank, site.ranks, call=asked.call)
    largest = largest_message(operands, site.rank, site.ranks, call=asked.call)
    name = operands[0].spec.kind_name
    schedule = choose(
        site.tuning,
        moves.kind,
        site.scratch,
        largest=largest,
        granted=_reached(asked, operands),
        name=name,
        ranks=site.ranks,
        blocks=site.blocks,
        own=moves.own_from.bytes,
    )
    how = how_all_reduce(site.tuning, schedule.regime, site.ranks)
    if how is not AllReduce.ONE_SHOT and name == "all_reduce":
        moves = plan_moves(operands, site.rank, site.ranks, all_reduce=how, call=asked.call)
    remote = remote_routes(site.rank, site.ranks, operands, moves) if schedule.regime is Regime.DIRECT else ()
    text = _text(site, operands, asked)
    if schedule.regime is Regime.DIRECT:
        text += LENT if moves.kind is Kind.REDUCE else GRANTED
    arguments = plan_arguments(
        site.rank, site.ranks, moves, schedule, text, asked.op, tensors[0].dtype, (inputs, outputs), remote
    )
    return _prepared(site, arguments, moves, schedule, tuple(operands), (inputs, outputs), text)


def prepare_all_to_all(
    site: Site, asked: Asked, x: Tensor, out: Tensor, out_sizes: Sequence[int] | None, in_sizes: Sequence[int] | None
) -> Prepared:
    """Plan an all_to_all_single of which a rank knows its own row and column only. Raises what prepare() raises."""
    _check_tensors(asked, [x], [out])
    _check_out(asked, out, tuple(out.shape), x.dtype)
    moves = all_to_all_moves(
        x.shape,
        x.stride(),
        out_shape=out.shape,
        out_strides=out.stride(),
        itemsize=x.element_size(),
        rank=site.rank,
        ranks=site.ranks,
        in_sizes=in_sizes,
        out_sizes=out_sizes,
    )
    site = site.within(asked.budget)
    why = "no rank knows the sizes between the others"
    schedule = Schedule(Regime.STAGED, site.scratch.teams, site.scratch.slots // 2, why)
    if site.tuning.gpu:
        roles = copying_roles(schedule, moves.own_from.bytes)
        schedule = with_parts(schedule, largest=_largest_own(moves), blocks=site.blocks, roles=roles)
    text = f"{asked.call} with sizes, rows of {tuple(x.shape[1:])} {_name(x.dtype)}"
    memories = (Memory.of("x", x),), (Memory.of("out", out),)
    arguments = plan_arguments(site.rank, site.ranks, moves, schedule, text, asked.op, x.dtype, memories, ())
    return _prepared(site, arguments, moves, schedule, (), memories, text)


def _largest_own(moves: Moves) -> int:
    """Bytes of the largest message that this rank sends or receives."""
    return max(route.bytes for route in (*moves.send, *moves.receive))


def in_place(site: Site, prepared: Prepared, at: Sequence[int], to: Sequence[int]) -> Prepared:
    """The same call on tensors that share storage; `at`, `to`: addresses. Raises AliasError unless it is in one of the three forms."""
    inputs = [replace(x, address=address) for x, address in zip(prepared.inputs, at, strict=True)]
    outputs = [replace(out, address=address) for out, address in zip(prepared.outputs, to, strict=True)]
    specs = [operand.spec for operand in prepared.operands]
    check_alias(prepared.moves, inputs, outputs, specs=specs, call=prepared.text.partition(" ")[0])
    schedule = replace(prepared.schedule, parts=_parts_in_place(prepared))
    onto_sent = prepared.moves.kind is Kind.REDUCE and all(spec.kind_name == "all_reduce" for spec in specs)
    changed = {"overlap_allowed": True, "onto_sent": onto_sent, "parts": schedule.parts}
    arguments = {**prepared.arguments, **changed}
    native = site.plan(arguments)
    return replace(
        prepared, native=native, arguments=arguments, schedule=schedule, overlapping=True, calls=0, captured=False
    )


def _parts_in_place(prepared: Prepared) -> int:
    """A gather in place copies nothing at home, so nobody has a block for that."""
    schedule = prepared.schedule
    if schedule.regime is Regime.DIRECT and _largest_own(prepared.moves) < schedule.teams * IN_PLACE_PARTS_TEAM_BYTES:
        return 1
    return min(schedule.parts, 2) if prepared.moves.kind is Kind.COPY else schedule.parts


# ---- what is asked for, checked


def _operands(
    site: Site, asked: Asked, tensors: Sequence[Tensor], out: Sequence[Tensor] | None
) -> tuple[list[Operand], tuple[Memory, ...], tuple[Memory, ...]]:
    """The operands, and how inputs and outputs lie."""
    texts = [asked.specs] * len(tensors) if isinstance(asked.specs, str) else asked.specs
    specs = [Spec.parse(text) for text in texts]
    if len(specs) != len(tensors) or not 1 <= len(tensors) <= MAX_TENSORS:
        raise ShapeError(
            f"{asked.call}: needs 1 to {MAX_TENSORS} tensors and one spec, or a spec for each; got {len(tensors)} tensors, {len(specs)} specs."
        )
    _check_tensors(asked, tensors, out)
    check_sizes(specs, dict(asked.sizes), call=asked.call)
    operands, inputs, outputs = [], [], []
    for i, (spec, x) in enumerate(zip(specs, tensors, strict=True)):
        sizes = tuple((name, size) for name, size in asked.sizes if name in spec.left.segments)
        name, result = (f"tensors[{i}]", f"out[{i}]") if len(tensors) > 1 else ("x", "out")
        shape = output_shape(spec, x.shape, site.rank, site.ranks, dict(sizes), call=asked.call, argument=name)
        if out is not None:
            _check_out(asked, out[i], shape, x.dtype)
        strides = contiguous(shape) if out is None else tuple(out[i].stride())
        operands.append(Operand(spec, tuple(x.shape), x.stride(), strides, x.element_size(), _name(x.dtype), sizes))
        inputs.append(Memory.of(name, x))
        outputs.append(Memory(result, 0, shape, strides, x.element_size()))
    check_op(asked.op, call=asked.call)
    if specs[0].partial:
        check_reducible(tensors[0].dtype, asked.op, call=asked.call)
    return operands, tuple(inputs), tuple(outputs)


def _check_tensors(asked: Asked, tensors: Sequence[Tensor], out: Sequence[Tensor] | None) -> None:
    if out is not None and len(out) != len(tensors):
        raise ShapeError(f"{asked.call}: `out` needs a tensor for each of {len(tensors)} inputs; got {len(out)}.")
    for name, x in [*(("x", x) for x in tensors), *(("out", o) for o in out or ())]:
        if x.device != asked.device:
            raise DeviceError(
                f"{asked.call}: `{name}` needs to be on {asked.device}, the communicator's device; got {x.device}. Move it there."
            )
        if x.layout is not torch.strided:
            raise ShapeError(f"{asked.call}: `{name}` needs to be a strided tensor; got {x.layout}. Call to_dense().")
        if x.requires_grad and torch.is_grad_enabled():
            raise DtypeError(
                f"{asked.call}: `{name}` requires grad, and collectives here have no backward. Use torch.no_grad() or x.detach()."
            )
        if x.is_conj() or x.is_neg():
            raise DtypeError(
                f"{asked.call}: `{name}` is a lazy conjugate or negative. Call resolve_conj() or resolve_neg()."
            )


def _check_out(asked: Asked, out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(out.shape) != shape:
        raise ShapeError(
            f"{asked.call}: `out` needs shape {shape}; got {tuple(out.shape)}. Leave it out to have it made."
        )
    if out.dtype != dtype:
        raise DtypeError(f"{asked.call}: `out` needs the dtype of `x`, {dtype}; got {out.dtype}.")


# ---- what the native side is told


def _prepared(
    site: Site,
    arguments: Mapping[str, Any],
    moves: Moves,
    schedule: Schedule,
    operands: tuple[Operand, ...],
    memories: tuple[tuple[Memory, ...], tuple[Memory, ...]],
    text: str,
) -> Prepared:
    native = site.plan(arguments)
    signature = arguments["signature"]
    sent, received = sent_bytes(moves), received_bytes(moves)
    return Prepared(native, arguments, moves, schedule, operands, *memories, text, signature, sent, received)


def _reached(asked: Asked, operands: Sequence[Operand]) -> bool:
    """Whether peers can reach what a direct call needs them to: outputs that they write; of an all-reduce an output that they read too; of a
    reduce-scatter an input that they read. What they read is one tensor, of which each has one stretch."""
    spec = operands[0].spec
    if not spec.partial:
        return asked.granted and len(operands) <= MAX_GRANTS
    in_order = len(operands) == 1 and tuple(spec.order) == tuple(range(len(spec.order)))
    if spec.kind_name == "all_reduce":
        return asked.granted and in_order
    return asked.lent and in_order and _is_cut_in_stretches(operands[0])


def _is_cut_in_stretches(operand: Operand) -> bool:
    """Whether a rank's part of a reduce-scatter is one stretch of its input: there is one index of all dims outside the one that is scattered."""
    right = operand.spec.right
    at = right.sharded_dim
    return at is not None and len(right.dims[at].segments) == 1 and all(extent == 1 for extent in operand.shape[:at])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(site: Site, operands: Sequence[Operand], asked: Asked) -> str:
    """The call as every rank would write it: specs, lengths over all ranks, dtypes, op, tag."""
    parts = []
    for operand in operands:
        lengths = operand.lengths(rank=site.rank, ranks=site.ranks, call=asked.call)
        rows = [
            f"{name}={'+'.join(map(str, lengths.shards.get(name, (whole,))))}" for name, whole in lengths.whole.items()
        ]
        parts.append(f'"{operand.spec}" ({" ".join(rows)}) {operand.dtype}')
    op = f" {asked.op}" if operands[0].spec.partial else ""
    tag = f" at {asked.tag}" if asked.tag else ""
    return f"{asked.call} {'; '.join(parts)}{op}{tag}"
