"""Rows for the terminal, in Markdown: what was measured, and below it what was not and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from purlin_diffusion.commands.machine import cores
from purlin_diffusion.commands.picture import call_arguments
from purlin_diffusion.commands.ranks import places, sharing
from purlin_diffusion.commands.timing.modes import HOWS
from purlin_diffusion.commands.timing.rows import Result, Row
from purlin_diffusion.commands.timing.truth import MOST
from purlin_diffusion.commands.timing.warmth import said, unlike

TITLES = ("mode", *HOWS)
DETAILS = (
    "mode",
    "ranks",
    "step, ms",
    "decode, ms",
    "pictures a minute",
    "speed-up",
    "memory a rank, GB",
    "exchanges, ms a step",
    "difference from 1 rank",
)
TRUTH = ("mode", "error of a call", "error / 1 rank", "error of the picture", "error / 1 rank")
HOST = (
    "mode",
    "host, ms a step",
    "allocations a step",
    "cudaMalloc a step",
    "host waits a step",
    "graphs recorded",
    "replayed",
)


def text(result: Result) -> str:
    parts = [headline(result)]
    if result.measured:
        parts.append("A picture, ms: median (least to most).\n\n" + markdown(TITLES, names_by_how(result)))
        parts.append(markdown(DETAILS, [details(row) for row in result.measured]))
        parts += [*said(result.warmth), *unlike(result.warmth)]
    if true := truths(result):
        parts.append(f"{TRUTH_SAYS}\n\n" + markdown(TRUTH, true))
    if hosts := host_lines(result):
        parts.append(f"{HOST_SAYS}\n\n" + markdown(HOST, hosts))
    parts += [*unwatchable(result), *ended_early(result)]
    if missing := reasons(result.rows):
        parts.append("Not measured:\n" + "\n".join(f"- [{n}] {why} ({who})" for n, (why, who) in enumerate(missing, 1)))
    return "\n\n".join(parts)


TRUTH_SAYS = (
    "Errors: root mean square, relative to the same weights and texts in float32 on one rank, of the first denoiser call and of the last latents."
    f" Over {MOST} times that of 1 rank, eager, is marked with !"
)
HOST_SAYS = (
    "The host, between two calls of the scheduler (the denoiser, and a little of the pipeline): until all is launched, without its waits for the GPU;"
    " blocks of torch's allocator; waits that a profiler saw. Graphs: of the first rank, in one visit or since it was compiled."
)


def unwatchable(result: Result) -> list[str]:
    """A line a mode that was timed and could not be watched."""
    return [f"{row.mode.title} could not be watched: {row.note}" for row in result.measured if row.note]


def ended_early(result: Result) -> list[str]:
    """A line a mode that was timed less often than was asked for."""
    asked = result.asked.repeats
    return [f"{row.mode.title}: {row.repeats} of {asked} repeats" for row in result.measured if row.repeats < asked]


def truths(result: Result) -> list[list[str]]:
    """A line a mode whose error is known."""
    return [
        [row.mode.title, f"{row.error.call:.2e}", over(row, 0), f"{row.error.picture:.2e}", over(row, 1)]
        for row in result.measured
        if row.error
    ]


def over(row: Row, which: int) -> str:
    if row.over_one is None:
        return ""
    return f"{row.over_one[which]:.2f}x" + " !" * (row.over_one[which] > MOST)


def host_lines(result: Result) -> list[list[str]]:
    """A line a mode that was watched on a GPU."""
    return [
        [
            row.mode.title,
            number(row.host.ms, ".2f"),
            number(row.host.allocations, ".0f"),
            number(row.host.mallocs, ".0f"),
            number(row.profile.syncs if row.profile else None, ".1f"),
            str(row.graphs.captures) if row.graphs else "",
            (str(row.graphs.replays) + f", off: {row.graphs.off}" * bool(row.graphs.off)) if row.graphs else "",
        ]
        for row in result.measured
        if row.host
    ]


def headline(result: Result) -> str:
    options, asked = result.options, result.asked
    arguments = {name: value for name, value in call_arguments(options).items() if name != "prompt"}
    said = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    how = "threads of one process" if options.mode == "threads" else "processes" if options.ranks > 1 else "rank"
    where = ", ".join(dict.fromkeys(places(options)))
    shared = f"{sharing(options)}\n" if sharing(options) else ""
    return (
        f"{options.model} ({said or 'defaults of the pipeline'}), {options.ranks} {how} on {where}, attention {', '.join(asked.attentions)}\n"
        f"{shared}"
        f"{asked.repeats} repeat{'s' * (asked.repeats > 1)}, interleaved, each after {asked.warmup} warm-up (2 for graphs); of the slowest rank;"
        f" speed-up: over the best of 1 rank, eager; {cores()} cores, shared by the ranks"
    )


def names_by_how(result: Result) -> list[list[str]]:
    """A line a mode, a cell a way to run its denoiser."""
    names = dict.fromkeys(row.mode.name for row in result.rows)
    whys = [why for why, _ in reasons(result.rows)]
    cells = {(row.mode.name, row.mode.how): cell(row, whys) for row in result.rows}
    return [[name, *(cells.get((name, how), "") for how in HOWS)] for name in names]


def cell(row: Row, whys: Sequence[str]) -> str:
    """`whys`: to whose places a row points that has no figure."""
    return row.whole_s.text(1e-3) if row.whole_s else f"no: [{whys.index(row.cannot) + 1}]"


def details(row: Row) -> list[str]:
    exchange, share = (row.profile.exchange_ms, row.profile.share) if row.profile else (None, None)
    return [
        row.mode.title,
        str(row.mode.ranks),
        row.step_s.text(1e-3) if row.step_s else "one step only",
        row.decode_s.text(1e-3) if row.decode_s else "",
        number(None if row.images_per_s is None else row.images_per_s * 60, ".1f"),
        number(row.speedup, ".2f", "x"),
        number(row.memory_gb, ".2f"),
        number(exchange, ".2f") + (f" ({share:.0%} of a watched one)" if share is not None else ""),
        likeness(row),
    ]


def number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def likeness(row: Row) -> str:
    if row.likeness is None:
        return ""
    psnr = row.likeness.psnr_db
    return "none" if psnr is None else f"max abs {row.likeness.max_abs:.1e}, PSNR {psnr:.1f} dB"


def reasons(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Why there is no figure, and of which modes, as text; each reason once."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row.cannot:
            found.setdefault(row.cannot, {}).setdefault(row.mode.name, []).append(row.mode.how)
    return [(why, who(names)) for why, names in found.items()]


def who(names: Mapping[str, Sequence[str]]) -> str:
    """Modes that share their ways to run are named together: "a, b: eager, graph"; "a, b" for all ways."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, hows in names.items():
        alike.setdefault(tuple(hows), []).append(name)
    said = {hows: "" if hows == HOWS else f": {', '.join(hows)}" for hows in alike}
    return "; ".join(f"{', '.join(group)}{said[hows]}" for hows, group in alike.items())


def markdown(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *lines))
