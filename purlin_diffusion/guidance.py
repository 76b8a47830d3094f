"""Guidance in one batch: where a pipeline asks for the unconditional and the conditional half in one call, each of two ranks computes one.

Rows of a batch know nothing of each other, so nothing moves inside the model; one exchange a call joins the halves of its output. Whether a call is
halved follows from the shapes of its arguments and the model's attention processors, which are alike on every rank: an even batch is, with processors
of which the plan knows that they keep rows apart, and any other call is cut by tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from purlin_core.errors import ShapeError
from purlin_core.spec import Layout
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.config import ParallelConfig
from purlin_diffusion.cut import map_entry
from purlin_diffusion.entry import BATCH, Cut, Entry, batch_dim
from purlin_diffusion.errors import NotBuiltError
from purlin_diffusion.paths import modules_at
from purlin_diffusion.plan import Plan
from purlin_diffusion.tree import leaves, map_output

HALVES = 2
_KINDS = {
    "none": "its pipelines guide without a second half",
    "calls": "its pipelines guide by two calls",
    "silent calls": "its pipelines guide by two calls, which nothing tells apart",
}


@dataclass(frozen=True)
class Manner:
    """How ranks share the calls of one model. mode: how tokens meet at an attention. unhalved: why no batch is halved; empty where even ones are."""

    mode: str
    unhalved: str = "not asked for"


def unhalved(plan: Plan, config: ParallelConfig, ranks: int) -> str:
    """Why `ranks` ranks halve no batch; empty where they halve even ones. Raises NotBuiltError where that was asked for and cannot be."""
    why = _cannot(plan, ranks)
    if config.cfg == HALVES and why:
        raise NotBuiltError(
            f"ParallelConfig: cfg=2 cannot be for {plan.model}: {why}. There is sequence parallelism: leave `cfg` out."
        )
    if why or config.cfg == HALVES:
        return why
    asked = {"cfg": config.cfg, "sequence": config.sequence, "attention": config.attention}
    chosen = (f"{name}={value!r}" for name, value in asked.items() if value not in (None, "auto"))
    return next((f"{text} was asked for" for text in chosen), "")


def _cannot(plan: Plan, ranks: int) -> str:
    if plan.cfg != "batched":
        return f"{_KINDS[plan.cfg]} (its plan says cfg={plan.cfg!r}), and halves are those of one batch"
    if plan.result is None:
        return "its plan does not say where its `output` has the batch"
    return "" if ranks == HALVES else f"guidance has two halves, and the ranks are {ranks}"


def stranger(plan: Plan, model: nn.Module) -> str:
    """An attention processor of `model` that may mix rows of the batch, for all the plan knows; empty where there is none."""
    sites = (module for path in plan.calls for _, module in modules_at(model, path))
    names = (_name(type(module.processor)) for module in sites)
    return next((name for name in names if name not in plan.rowwise), "")


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__.startswith("diffusers.") else f"{kind.__module__}.{kind.__name__}"


def rows_to_halve(entries: Mapping[str, Entry], arguments: Mapping[str, Any]) -> int | None:
    """Rows of the batch of a call with `arguments`; None where they cannot be halved: an odd count, or tensors differ. One row is for all rows."""
    found: set[int] = set()

    def look(entry: Cut, x: Tensor, where: str) -> Tensor:
        dim = _batch(entry, x)
        if dim is not None:
            found.add(x.shape[dim])
        return x

    _each(entries, arguments, look)
    rows = found - {1}
    return next(iter(rows)) if len(rows) == 1 and all(n > 0 and n % HALVES == 0 for n in rows) else None


def half(entries: Mapping[str, Entry], arguments: Mapping[str, Any], rows: int, rank: int) -> dict[str, Any]:
    """`arguments` with `rank`'s half of the `rows` of every tensor that has them, as views."""
    mine = rows // HALVES

    def take(entry: Cut, x: Tensor, where: str) -> Tensor:
        dim = _batch(entry, x)
        return x if dim is None or x.shape[dim] == 1 else x.narrow(dim, rank * mine, mine)

    return _each(entries, arguments, take)


def joined(output: Any, form: Layout, carrier: Carrier, rows: int) -> tuple[Any, int]:
    """What the root returned for each half, every tensor of which lies as `form` says, as one for all `rows`; and the bytes of this rank's half.

    Raises ShapeError on every rank, before anything moves.
    """
    dim, mine = batch_dim(form), rows // HALVES
    assert dim is not None, "plan.py lets no other through"
    tensors = [x for _, x in leaves(output) if isinstance(x, Tensor)]
    for x in tensors:
        if x.ndim != len(form.dims) or x.shape[dim] != mine:
            raise ShapeError(
                f"output of the root needs the dims ({form}) with {mine} rows of the batch; got shape {tuple(x.shape)}."
                " Its plan leaves out an argument that has a batch, or says `output` wrongly; cfg=1 cuts by tokens alone."
            )
    left = " ".join(f"{each}@" if i == dim else str(each) for i, each in enumerate(form.dims))
    results = iter(carrier.exchange(tensors, [f"{left} -> {form}"] * len(tensors), sizes={BATCH: (mine,) * HALVES}))
    # a copy: the caller may keep it, and what is kept of a communicator's heap has to be alike on every rank
    return map_output(output, lambda _: next(results).clone()), sum(x.numel() * x.element_size() for x in tensors)


def _batch(entry: Cut, x: Tensor) -> int | None:
    form = entry.form(x.ndim)
    return None if form is None else batch_dim(form)


def _each(entries: Mapping[str, Entry], arguments: Mapping[str, Any], change: Any) -> dict[str, Any]:
    return {
        name: map_entry(entries[name], value, change, f"`{name}`") if name in entries else value
        for name, value in arguments.items()
    }
