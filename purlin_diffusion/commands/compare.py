"""Should I use this on my box? A short `latency` with the settings chosen for the machine, and one screen that answers."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator

from purlin_diffusion.commands import latency
from purlin_diffusion.commands.exits import DONE, FAILED, ended
from purlin_diffusion.commands.machine import cores
from purlin_diffusion.commands.options import gpus
from purlin_diffusion.commands.ranks import places, sharing
from purlin_diffusion.commands.telling import Telling
from purlin_diffusion.commands.timing.record import gpu_names
from purlin_diffusion.commands.timing.rows import Result, Row, median
from purlin_diffusion.commands.timing.table import ended_early, reasons
from purlin_diffusion.commands.timing.warmth import unlike

FULL, SMALL = "random:flux.1-dev", "digits"
ROOM_BYTES = 48e9  # of GPU memory, for the full one: 24e9 of weights, and what a picture and a copy's graphs need
WORTH = 1.05  # times as fast: less than that is noise
SCREEN = 100  # columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    latency.add_arguments(parser)
    parser.set_defaults(model=None, repeats=3)


def run(args: argparse.Namespace) -> int:
    return ended("compare", lambda: compare(args))


def compare(args: argparse.Namespace) -> int:
    """Raises InputError before any rank starts, and what a rank raised."""
    args.model = args.model or fitting()
    if args.ranks is None and "RANK" not in os.environ:  # else a launcher has said how many
        args.ranks = default_ranks()
    sizes, asked = latency.read(args)
    tell = Telling("compare", args, lambda results: "\n\n".join(map(screen, results)))
    sound = all(result.sound for result in latency.timed(sizes, asked, tell, "compare"))
    return DONE if sound and not tell.failed else FAILED


def fitting() -> str:
    """The model to look at, where the user names none."""
    import torch

    room = torch.cuda.mem_get_info(0)[1] if gpus() else 0
    return FULL if room >= ROOM_BYTES else SMALL


def default_ranks() -> int:
    """A GPU each; on one GPU one, for ranks that share it show no speed; two on a CPU, to see that it works."""
    return min(gpus(), 8) or 2


# ---- the screen ------------------------------------------------------------------------------------------------------
def screen(result: Result) -> str:
    wrapped = (textwrap.wrap(line, SCREEN, subsequent_indent="   ") for line in told(result))
    return "\n".join(line for lines in wrapped for line in lines or [""])


def told(result: Result) -> Iterator[str]:
    options = result.options
    yield f"{options.model} on {options.ranks} rank{'s' * (options.ranks > 1)}, {place(result)}"
    yield f"-> {verdict(result)}"
    yield ""
    longest = max((len(row.mode.title) for row in result.measured), default=0)
    for row in sorted(result.measured, key=median):
        yield f"   {row.mode.title:<{longest}}  {figures(row)}"
    yield ""
    yield from unknown(result)
    yield from ended_early(result)
    yield from unlike(result.warmth)
    asked = result.asked
    yield f"{asked.repeats} repeats, interleaved, after {asked.warmup} warm-up each. Plots: latency --html FILE"


def place(result: Result) -> str:
    return gpu_names() if places(result.options)[0] != "cpu" else f"{cores()} CPU cores"


def verdict(result: Result) -> str:
    """What is gained for one picture, of what was measured in this run; nothing is told of what was not. On one rank what is ours is its graphs."""
    single = result.options.ranks == 1
    alone = [row for row in result.measured if row.mode.kind == "alone" and not (single and row.mode.graph)]
    ours = [row for row in result.measured if (row.mode.parallelized if single else row.mode.kind == "ours")]
    one, mine = min(alone, key=median, default=None), min(ours, key=median, default=None)
    others = result.best("balanced", "context")
    if one is None or mine is None:
        return "No answer: " + ("ours" if one else "one rank") + " could not be measured here, see below."
    if sharing(result.options):
        return "No answer on speed: " + sharing(result.options) + "."
    gain = median(one) / median(mine)
    if gain < WORTH:
        return f"Not for this model here: ours ({mine.mode.title}) takes {1 / gain:.2f}x the time of one rank ({one.mode.title})."
    rival = f"; {times(mine, others)} the next best, {others.mode.title}" if others else ""
    how = f" with {mine.mode.title}" if single else ""
    return f"Yes: a picture {gain:.2f}x as fast as by one rank ({one.mode.title}){how}{rival}."


def times(mine: Row, other: Row) -> str:
    return f"{median(other) / median(mine):.2f}x as fast as"


def figures(row: Row) -> str:
    speedup = f"{row.speedup:5.2f}x" if row.speedup else " " * 6
    memory = f"{row.memory_gb:6.1f} GB" if row.memory_gb is not None else ""
    rate = f"{row.images_per_s * 60:8.1f} a minute" if row.images_per_s else ""
    took = row.whole_s.text(1e-3, "ms") if row.whole_s else ""
    return f"{took:<28}{speedup}{rate}{memory}"


def unknown(result: Result) -> Iterator[str]:
    """What could not be measured, and why."""
    if wrong := [row.mode.title for row in result.measured if row.true is False]:
        yield f"Further from float32 than rounding explains: {', '.join(wrong)}. Do not use those; `latency` shows the errors."
    if places(result.options)[0] == "cpu":
        yield "Not known: what GPUs gain. None is used here, and a CPU's figures say nothing of theirs."
    elif gpus() == 1:
        yield "Not known: what several GPUs gain. Ranks that share the one here would show that it works, not how fast."
    for why, who in reasons(result.rows):
        yield f"Not measured: {who} - {why}"
