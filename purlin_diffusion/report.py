"""What a parallel model does, as text: who carries the exchanges and why, what is cut where, and the bytes of a step, by formula and by value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from purlin_diffusion.attention.layout import AttentionLayout, Part
from purlin_diffusion.attention.ulysses import head_shares
from purlin_diffusion.beside import beside_of
from purlin_diffusion.config import ParallelConfig
from purlin_diffusion.graph.counts import GraphCounts
from purlin_diffusion.graph.decoding import Decoding
from purlin_diffusion.guidance import stranger
from purlin_diffusion.paths import modules_at
from purlin_diffusion.session import Session
from purlin_diffusion.sharded import ShardedModel

FORMULAS = {
    "gather_kv": "rank r sends (ranks - 1) x batch x tokens_r x 2 x width (k and v to all)",
    "ulysses": "rank r sends batch x tokens_r x 3 x (width - width_r) (q, k, v to heads) + batch x (tokens - tokens_r) x width_r (back)",
}


def explain(session: Session, config: ParallelConfig, decoding: Decoding | None = None) -> str:
    """The report of one denoiser; bytes and tokens have values once it has run."""
    sharded, ranks = session.sharded, session.ranks
    plan = sharded.plan
    lines = [
        f"{plan.model} on {ranks} rank{'s' * (ranks > 1)}, {_degrees(sharded)}, attention={sharded.mode} ({config.attention} was asked for)",
        f"exchanges  {session.route}{_overlap(session)}",
        f"plan       written for diffusers {plan.written_for}; guidance: {plan.cfg}; graph: {plan.graph}",
        *_graph_lines(session),
        f"vae        whole on every rank that decodes (not sharded yet){'; ' + _graphs(decoding.counts()) if decoding else ''}",
        *_guidance_lines(sharded, config),
        *(f"cut        {name} ({entry})" for name, entry in plan.arguments.items() if entry.segments),
        *(
            f"cut        {door.path}{' ->' * door.outputs} {key} ({entry})"
            for door in plan.doors
            for key, entry in door.entries.items()
        ),
        *(f"whole at   {path} ({entry})" for path, entry in plan.exits.items()),
        *_attention_lines(sharded),
        f"refused    {', '.join(plan.refuse) or 'nothing'}",
    ]
    return "\n".join([*lines, *_step_lines(sharded)])


def undone(session: Session) -> str:
    """What there is to say when the model has been given back."""
    ranks, calls = session.ranks, session.sharded.counters().calls
    done = f"{calls} call{'s' * (calls != 1)} on {ranks} rank{'s' * (ranks != 1)}"
    return f"{session.sharded.plan.model} is undone: it was given back as it was, after {done}; this handle says no more of it"


def _degrees(sharded: ShardedModel) -> str:
    ranks = sharded.carrier.ranks
    return f"sequence={ranks}" if sharded.manner.unhalved else f"cfg={ranks} (sequence={ranks} where a batch is odd)"


def _guidance_lines(sharded: ShardedModel, config: ParallelConfig) -> Iterator[str]:
    if sharded.manner.unhalved:
        if sharded.plan.cfg == "batched" and sharded.carrier.ranks > 1:
            yield f"guidance   every batch is cut by tokens, none halved: {sharded.manner.unhalved}"
        return
    asked = "cfg=2 was asked for" if config.cfg else "chosen; cfg=1 cuts by tokens alone"
    yield f"guidance   halves an even batch: rank 0 the first rows, rank 1 the last, of all tokens each ({asked})"
    yield "           there each rank sends its half of the output, and nothing else"
    if name := stranger(sharded.plan, sharded.model):
        yield f"           but not now: {name} may mix rows, for it is not in the plan's `rowwise`; all calls are cut by tokens:"
    else:
        yield "           a call with an odd batch, as skip-layer guidance makes one, is cut by tokens:"


def _overlap(session: Session) -> str:
    beside = next(filter(None, map(beside_of, session.carriers)), None)
    return "" if beside is None or session.sharded.mode != "gather_kv" else f"; {beside.how}"


def _graph_lines(session: Session) -> Iterator[str]:
    for each in session.counters():
        yield f"graphs     rank {each.rank}: {_graphs(each.graphs)}"
        if session.graphs_off:
            return


def _graphs(counts: GraphCounts) -> str:
    done = (
        f"{counts.captures} recorded in {counts.capture_ms:.0f} ms, {counts.replays} replayed, {counts.evictions} given up,"
        f" {counts.pool_bytes / 2**20:.0f} MiB"
    )
    if not counts.off:
        return f"CUDA graphs: {done}"
    return f"runs eagerly: {counts.off}" + f" ({done})" * (counts.captures > 0)


def step_bytes(sharded: ShardedModel) -> list[int] | None:
    """Payload bytes each rank sends in a step like the last one, inputs and adapters apart; None before the first."""
    if sharded.batch is None:
        return None
    ranks = sharded.division.ranks
    if sharded.halved is not None:
        return [(ranks - 1) * sharded.half_bytes] * ranks
    sent = [0] * ranks
    if ranks > 1:
        for module, layout in _first_calls(sharded):
            for rank, each in enumerate(_attention_bytes(sharded, module, layout)):
                sent[rank] += each
        for path, entry in sharded.plan.exits.items():
            for _, module in modules_at(sharded.model, path):
                for rank in range(ranks):
                    tokens = sum(_shares(sharded, [Part(name, True) for name in entry.segments], rank))
                    sent[rank] += (ranks - 1) * sharded.batch * tokens * _width_out(module) * sharded.item_bytes
    return sent


def _attention_lines(sharded: ShardedModel) -> Iterator[str]:
    for path, calls in sharded.plan.calls.items():
        there = modules_at(sharded.model, path)
        if there:
            yield f"attention  {path} x {len(there)}: {calls}"
    yield f"bytes      {FORMULAS[sharded.mode]}, times the bytes of an element, for each attention"
    yield "           and rank r sends (ranks - 1) x batch x tokens_r x channels where the output is made whole"


def _step_lines(sharded: ShardedModel) -> Iterator[str]:
    sent = step_bytes(sharded)
    if sent is None:
        yield "last step  none yet"
        return
    division = sharded.division
    for segment in sharded.plan.segments:
        if division.knows(segment.name):
            held = [division.local(segment.name, rank) for rank in range(division.ranks)]
            kept = ", whole on every rank: fewer than the plan's `min` a rank" * (segment.name in division.kept)
            kept = kept if sharded.halved is None else ", each of its half of the batch"
            yield f"tokens     {segment.name}: {division.total(segment.name)} = {held} by rank{kept}"
    if sharded.halved is not None:
        yield f"last step  1 exchange, {sum(sent)} bytes = {sent} by rank; batch {sharded.halved}, halved"
        return
    exchanges = {"gather_kv": 1, "ulysses": 2}[sharded.mode] * len(list(_first_calls(sharded))) + len(
        sharded.plan.exits
    )
    yield f"last step  {exchanges if division.ranks > 1 else 0} exchanges, {sum(sent)} bytes = {sent} by rank; batch {sharded.batch}"


def _first_calls(sharded: ShardedModel) -> Iterator[tuple[nn.Module, AttentionLayout]]:
    """Each attention module with the layout of its first call; further calls are those of adapters."""
    for path, calls in sharded.plan.calls.items():
        for _, module in modules_at(sharded.model, path):
            yield module, calls[0]


def _attention_bytes(sharded: ShardedModel, module: nn.Module, layout: AttentionLayout) -> list[int]:
    ranks, width = sharded.division.ranks, int(module.inner_dim)  # type: ignore[arg-type]
    unit = (sharded.batch or 0) * sharded.item_bytes
    queries, keys = (
        [sum(_shares(sharded, parts, rank)) for rank in range(ranks)] for parts in (layout.queries, layout.keys)
    )
    if not any(keys):
        return [0] * ranks
    if sharded.mode == "gather_kv":
        return [unit * (ranks - 1) * keys[rank] * 2 * width for rank in range(ranks)]
    heads = int(module.heads)  # type: ignore[arg-type]
    mine = [share * width // heads for share in head_shares(heads, ranks)]
    to_heads = [unit * (queries[rank] + 2 * keys[rank]) * (width - mine[rank]) for rank in range(ranks)]
    return [to_heads[rank] + unit * (sum(queries) - queries[rank]) * mine[rank] for rank in range(ranks)]


def _shares(sharded: ShardedModel, parts: Sequence[Part], rank: int) -> list[int]:
    return [
        sharded.division.shares[part.name][rank]
        for part in parts
        if part.sharded and part.name in sharded.division.shares
    ]


def _width_out(module: nn.Module) -> int:
    return int(module.out_features)  # type: ignore[arg-type]
