"""What the native side is told of a call: numbers, routes by peer, signatures. csrc/purlin/endpoint.hpp says how it reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from purlin_core.alias import Memory
from purlin_core.moves import Kind, Moves, Route
from purlin_core.plan import Operand, plan_moves, seen_by
from purlin_core.settings import VERSION
from purlin_core.spec import Op
from purlin_core.tune import Regime, Schedule

# numbered as Op and Dtype of csrc/purlin/spec.hpp
OPS: tuple[Op, ...] = ("sum", "avg", "max", "min")
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
)


def plan_arguments(
    rank: int,
    ranks: int,
    moves: Moves,
    schedule: Schedule,
    text: str,
    op: Op,
    dtype: torch.dtype,
    memories: tuple[tuple[Memory, ...], tuple[Memory, ...]],
    remote: Sequence[Route],
) -> dict[str, Any]:
    """Keyword arguments of the native Plan. Routes go by peer, not by rank."""
    peers = [(rank + 1 + p) % ranks for p in range(ranks - 1)]
    send, receive = [moves.send[r] for r in peers], [moves.receive[r] for r in peers]
    away = [remote[r] for r in peers] if remote else [Route()] * len(peers)
    inputs, outputs = memories
    lent = inputs if moves.kind is Kind.REDUCE else outputs
    grants = len(lent) if schedule.regime is Regime.DIRECT else 0
    signature = _signature(f"{text}|{schedule.regime.name}|{schedule.teams}|{schedule.lag}|{VERSION}")
    return {
        "kind": int(moves.kind),
        "regime": int(schedule.regime),
        "op": OPS.index(op),
        "dtype": DTYPES.index(dtype) if dtype in DTYPES else 0,  # copies look at bytes only
        "rank": rank,
        "teams": schedule.teams,
        "parts": schedule.parts,
        "lag": schedule.lag,
        "grants": grants,
        "signature": signature,
        "own_from": _numbers(moves.own_from),
        "own_to": _numbers(moves.own_to),
        "send": [_numbers(route) for route in send],
        "remote": [_numbers(route) for route in away],
        "receive": [_numbers(route) for route in receive],
        "reach": [_reach(route, grants) for route in away],
        "send_signatures": [_pair_signature(signature, route.bytes) for route in send],
        "receive_signatures": [_pair_signature(signature, _expected_bytes(moves, route)) for route in receive],
        "input_spans": [x.end - x.address for x in inputs],
        "output_spans": [out.end - out.address for out in outputs],
        "overlap_allowed": False,
        "onto_sent": False,
    }


def remote_routes(rank: int, ranks: int, operands: Sequence[Operand], moves: Moves) -> list[Route]:
    """Of each rank: where what I send lies in its outputs, or my slice in what it lends. All of that is contiguous."""
    mine = {Kind.ALL_REDUCE: moves.own_to, Kind.REDUCE: moves.own_from}.get(moves.kind)
    return [Route() if peer == rank else mine or _received_by(rank, ranks, operands, peer) for peer in range(ranks)]


def _received_by(rank: int, ranks: int, operands: Sequence[Operand], peer: int) -> Route:
    theirs = [seen_by(operand, rank, ranks, peer) for operand in operands]
    return plan_moves(theirs, peer, ranks).receive[rank]


def _expected_bytes(moves: Moves, route: Route) -> int:
    """Wire bytes the peer counts as its send to me: in a joined all-reduce my slice, else what I receive."""
    return moves.own_from.bytes if moves.kind is Kind.ALL_REDUCE else route.bytes


def _numbers(route: Route) -> list[int]:
    """A route as csrc/purlin/endpoint.hpp reads it."""
    numbers = [route.lo, route.bytes]
    for item in route.items:
        box = item.box
        numbers += [item.tensor, item.at, box.offset, box.run, len(box.extents), *box.extents, *box.strides]
    return numbers


def _reach(route: Route, grants: int) -> int:
    """Bytes that each of a peer's granted outputs needs to have, in which this route lies: those of the one that it needs least of."""
    reaches = [0] * grants
    for item in route.items:
        needed = item.box.offset + _distance(item.box.extents, item.box.strides) + item.box.run
        reaches[item.tensor] = max(reaches[item.tensor], needed)
    return min(reaches, default=0)


def _distance(extents: Sequence[int], strides: Sequence[int]) -> int:
    """From the first element to the last."""
    return sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))


def _signature(text: str) -> int:
    """24 bits; the same in every process, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=3).digest(), "big")


def _pair_signature(signature: int, wire_bytes: int) -> int:
    return _signature(f"{signature}|{wire_bytes}")
