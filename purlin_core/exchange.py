"""Calls by specs, of any tensors into tensors given or made here: what their plans are kept by, and where results lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from purlin_core.calls import Calls
from purlin_core.facts import facts_of
from purlin_core.memory import address_of
from purlin_core.plan import FrozenSizes
from purlin_core.prepare import Asked, Prepared, prepare
from purlin_core.results import are_granted, in_heap, ordinary, prepare_granted
from purlin_core.spec import Op


def exchange(
    calls: Calls,
    call: str,
    tensors: Sequence[Tensor],
    out: Sequence[Tensor] | None,
    specs: str | tuple[str, ...],
    sizes: FrozenSizes,
    op: Op,
    tag: str,
) -> list[Tensor]:
    """Make a call by specs; the results."""
    prepared, key, at, to = _found(calls, call, tensors, out, specs, sizes, op, tag)
    if out is None:
        if are_granted(prepared):
            prepared, key, out = _in_heap(calls, prepared, key, tensors)
        else:
            out = ordinary(prepared, tensors)
    calls.run(prepared, tensors, out, at, to or [address_of(o) for o in out], key)
    return list(out)


def plan(
    calls: Calls,
    call: str,
    tensors: Sequence[Tensor],
    out: Sequence[Tensor] | None,
    specs: str | tuple[str, ...],
    sizes: FrozenSizes,
    op: Op,
    tag: str,
) -> Prepared:
    """The plan of exchange() with these arguments, kept for it; nothing is sent."""
    return _found(calls, call, tensors, out, specs, sizes, op, tag)[0]


def _found(
    calls: Calls,
    call: str,
    tensors: Sequence[Tensor],
    out: Sequence[Tensor] | None,
    specs: str | tuple[str, ...],
    sizes: FrozenSizes,
    op: Op,
    tag: str,
) -> tuple[Prepared, Any, list[int], list[int] | None]:
    """A plan, made if there is none; what it is kept by; where inputs lie, and outputs that are given."""
    facts, at = facts_of(tensors)
    wanted, to = (None, None) if out is None else facts_of(out)
    heap = calls.tie.heap
    granted = out is not None and heap.holds_all(out)
    lent = _sums(specs) and heap.holds_all(tensors)
    key = (call, specs, sizes, op, tag, calls.budget, granted, lent, facts, wanted)
    prepared = calls.plans.get(key)
    if prepared is None:
        asked = Asked(call, specs, sizes, op, tag, calls.device, granted, lent, calls.budget)
        prepared = _plan(calls, key, asked, tensors, out)
    return prepared, key, at, to


def _sums(specs: str | tuple[str, ...]) -> bool:
    """Whether peers may read the inputs where they lie."""
    return "+" in (specs if isinstance(specs, str) else specs[0])


def _plan(calls: Calls, key: Any, asked: Asked, tensors: Sequence[Tensor], out: Sequence[Tensor] | None) -> Prepared:
    if out is None and calls.granted_results:
        return calls.planned(key, asked.call, partial(prepare_granted, calls.tie.site, asked, tensors))
    return calls.planned(key, asked.call, partial(prepare, calls.tie.site, asked, tensors, out))


def _in_heap(
    calls: Calls, prepared: Prepared, key: Any, tensors: Sequence[Tensor]
) -> tuple[Prepared, Any, list[Tensor]]:
    """Granted results; without room another plan, and ordinary ones."""
    results = in_heap(prepared, tensors, calls.tie.heap)
    if results is None:
        call, specs, sizes, op, tag, budget = key[:6]
        asked = Asked(call, specs, sizes, op, tag, calls.device, granted=False, budget=budget)
        key = (key, "ordinary")
        make = partial(prepare, calls.tie.site, asked, tensors, None)
        prepared = calls.plans.get(key) or calls.planned(key, call, make)
        results = ordinary(prepared, tensors)
    return prepared, key, results
