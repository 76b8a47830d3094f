"""Calls under the names that torch.distributed has for them, of one tensor into another. What each means stands in collectives.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from purlin_core import ops
from purlin_core.arguments import check_shares, check_types
from purlin_core.calls import Calls
from purlin_core.collectives import as_spec, rows_of
from purlin_core.facts import facts_of
from purlin_core.memory import address_of
from purlin_core.plan import freeze_sizes
from purlin_core.prepare import Asked, Prepared, in_place, prepare, prepare_all_to_all
from purlin_core.spec import Op


def into(calls: Calls, call: str, out: Tensor, x: Tensor, sizes: Sequence[int] | None, op: Op) -> Tensor:
    """The call of this name: its spec follows from that and the dims of `x`. The shortest way, for it is the latency of small calls."""
    if torch.compiler.is_dynamo_compiling():
        spec, shaped, target = as_spec(call, x, out, calls.ranks)
        ops.exchange(calls.id, [shaped], spec, sizes=rows_of("d0", sizes), op=op, out=[target], tag="")
        return out
    try:
        facts, (at, to) = facts_of((x, out))
        heap, rows = calls.tie.heap, None if sizes is None else tuple(sizes)
        key = (call, op, rows, calls.budget, heap.lo <= to < heap.hi, heap.lo <= at < heap.hi, out is x, facts)
        prepared = calls.plans.get(key)
        if prepared is None:
            prepared = calls.planned(key, call, partial(_prepare, calls, call, out, x, sizes, op))
        calls.run(prepared, (x,), (out,), [at], [to], key)
    except (AttributeError, TypeError, ValueError) as error:
        calls.refuse(error, partial(_check, call, out, x, op, sizes=sizes))
    return out


def all_to_all(
    calls: Calls, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None, in_sizes: Sequence[int] | None
) -> Tensor:
    """all_to_all_single with sizes, which has no spec: no rank knows what the others send to each other."""
    call = "all_to_all_single"
    try:
        shares = tuple(None if sizes is None else tuple(sizes) for sizes in (out_sizes, in_sizes))
        facts, (at, to) = facts_of((x, out))
        key = (call, shares, calls.budget, facts)
        prepared = calls.plans.get(key)
        if prepared is None:
            asked = Asked(call, "", (), "sum", "", calls.device, granted=False, budget=calls.budget)
            make = partial(prepare_all_to_all, calls.tie.site, asked, x, out, *shares)
            prepared = calls.planned(key, call, make)
        calls.run(prepared, (x,), (out,), [at], [to], key)
    except (AttributeError, TypeError, ValueError) as error:
        calls.refuse(error, partial(_check, call, out, x, "sum", out_sizes=out_sizes, in_sizes=in_sizes))
    return out


def _check(call: str, out: Tensor, x: Tensor, op: Op, **shares: Sequence[int] | None) -> None:
    """The types of all arguments."""
    check_types(call, [x], [out], "", None, op=op)
    check_shares(call, shares)


def _prepare(calls: Calls, call: str, out: Tensor, x: Tensor, sizes: Sequence[int] | None, op: Op) -> Prepared:
    site, heap = calls.tie.site, calls.tie.heap
    granted, lent = heap.holds_all([out]), heap.holds_all([x])
    spec, shaped, target = as_spec(call, x, out, calls.ranks)
    asked = Asked(call, spec, freeze_sizes(rows_of("d0", sizes)), op, "", calls.device, granted, lent, calls.budget)
    prepared = prepare(site, asked, [shaped], [target])
    if out is x:
        to = address_of(out)
        prepared = in_place(site, prepared, [to], [to])
    return prepared
