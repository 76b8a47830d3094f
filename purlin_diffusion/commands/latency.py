"""Time a picture: one rank against several, ours against what else there is, in one run and with the repeats interleaved.

Every visit to a mode makes the pipeline ready anew, draws `--warmup` pictures that do not count and one that does, so that no mode owns the quiet
half of the run. A time is that of the slowest rank; a mode that cannot run is a row that says why. After the repeats each mode draws a few times
more and is watched: from those calls are the time in exchanges, the timeline, the host's cost and the picture, and no other figure. A run that ends
early, by Ctrl-C, by SIGTERM or by a rank's failure, tells what it has measured until then.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from purlin_diffusion.commands.exits import DONE, FAILED, InputError, ended
from purlin_diffusion.commands.files import check_apart, check_writable
from purlin_diffusion.commands.last_words import LastWords
from purlin_diffusion.commands.options import (
    Options,
    add_model_arguments,
    check_config,
    check_count,
    read_options,
)
from purlin_diffusion.commands.ranks import on_ranks, places
from purlin_diffusion.commands.telling import OUTPUTS, Telling
from purlin_diffusion.commands.timing.measure import measure
from purlin_diffusion.commands.timing.modes import HOWS, WHO, Asked
from purlin_diffusion.commands.timing.rows import Result, new_run, summarize
from purlin_diffusion.commands.timing.table import text
from purlin_diffusion.commands.timing.visit import Visits, kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--size",
        nargs="+",
        metavar="N | WxH",
        help="pixels, for --width and --height; several are timed one after the other",
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each mode (default: 5)")
    parser.add_argument("--warmup", type=int, default=1, help="calls before each timed one (default: 1)")
    parser.add_argument(
        "--how",
        nargs="+",
        choices=HOWS,
        metavar="HOW",
        help=f"{' '.join(HOWS)} beside eager (default: all; on a CPU, where compiling takes a minute, {' '.join(HOWS[:2])})",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=WHO,
        metavar="WHO",
        help="of alone (one rank, always there), balanced, split (accelerate's), context (diffusers'), torch (ours over it), ours",
    )
    parser.add_argument(
        "--truth",
        action=argparse.BooleanOptionalAction,
        help="tell each mode's error against float32 beside one rank's (default: on GPUs, where a copy in float32 has room)",
    )
    parser.add_argument(
        "--watch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="after the repeats look at each mode once more: exchanges, timeline, host, picture (default: yes; a quarter of the time)",
    )
    parser.add_argument("--commit", default="", help="for the record, where git cannot say")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows, every repeat and the machine there")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append a line of JSON a row there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots and pictures there")


def run(args: argparse.Namespace) -> int:
    return ended("latency", lambda: latency(args))


def latency(args: argparse.Namespace) -> int:
    """Raises InputError before any rank starts, and what a rank raised."""
    sizes, asked = read(args)
    tell = Telling("latency", args, lambda results: "\n\n".join(map(text, results)))
    sound = all(result.sound for result in timed(sizes, asked, tell))
    return DONE if sound and not tell.failed else FAILED


def read(args: argparse.Namespace) -> tuple[list[Options], Asked]:
    """What each size is, and what is asked for all. Raises InputError."""
    files = {f"--{each.option}": file for each in OUTPUTS if (file := getattr(args, each.option))}
    for name, file in files.items():
        check_writable(name, file)
    check_apart(files)
    check_count("--repeats", args.repeats)
    check_count("--warmup", args.warmup)
    if args.size and (args.height is not None or args.width is not None):
        raise InputError("--size stands for --width and --height: leave those out")
    sides = [read_size(size) for size in args.size or ()]
    attentions = tuple(dict.fromkeys(args.attention.split(",")))
    args.attention = attentions[0]
    options = read_options(args)
    for attention in attentions[1:]:
        check_config(replace(options, attention=attention))
    cheap = HOWS[:2] if places(options)[0] == "cpu" else HOWS
    chosen = {HOWS[0], *(args.how or cheap)}  # eager is what all others are compared with
    asked = Asked(
        args.repeats,
        args.warmup,
        tuple(how for how in HOWS if how in chosen),
        tuple(who for who in WHO if who in {"alone", *(args.modes or WHO)}),
        args.truth,
        attentions,
        args.commit,
        args.watch,
        bool(sides),
    )
    return [replace(options, width=width, height=height) for width, height in sides] or [options], asked


def read_size(size: str) -> tuple[int, int]:
    """Width and height. Raises InputError."""
    sides = size.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise InputError(f"--size needs pixels, as 1024 or 1024x768 (width x height); got {size!r}")
    return int(sides[0]), int(sides[-1])


def timed(
    sizes: Sequence[Options], asked: Asked, tell: Callable[[list[Result]], None], command: str = "latency"
) -> list[Result]:
    """All visits of all ranks, summarized size by size, and told as `command`; nothing on the ranks of a launcher that are not its root.

    Raises what a rank raised, and KeyboardInterrupt, when what was measured until then has been told.
    """
    with tempfile.TemporaryDirectory(prefix="purlin-latency-") as folder:
        so_far = Path(folder) / "visits"

        def say() -> None:
            if any(visit.seconds for every in kept(so_far) for visit in every[0]):
                tell(results(sizes, asked, kept(so_far)))

        launched = sizes[0].mode == "launched"
        with LastWords(
            command, say, launched=launched, cleaned=lambda: shutil.rmtree(folder, ignore_errors=True)
        ) as words:
            done = on_ranks(measure, sizes[0], sizes, asked, so_far)
            found = results(sizes, asked, done[0]) if done else []
            if found:
                words.say(lambda: tell(found))
    return found


def results(sizes: Sequence[Options], asked: Asked, visits: Sequence[Visits]) -> list[Result]:
    """Of one run: of each size, those that were not reached saying so."""
    run = new_run()
    every = [*visits, *([[]] * (len(sizes) - len(visits)))]
    return [summarize(options, asked, seen, run) for options, seen in zip(sizes, every, strict=True)]
