"""Time a picture: one rank against several, ours against what else there is, in one run and with the repeats interleaved.

Every visit to a mode makes the pipeline parallel anew, draws `--warmup` pictures that do not count and one that does, so that no mode owns the quiet
half of the run. A time is that of the slowest rank; a mode that cannot run is a row that says why. After the repeats each mode draws once
more and is watched: from that call are the time in exchanges, the timeline and the picture, and no other figure.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from purlin_diffusion.commands.exits import DONE, InputError, ended
from purlin_diffusion.commands.options import (
    Options,
    add_model_arguments,
    check_count,
    check_writable,
    read_options,
)
from purlin_diffusion.commands.ranks import on_ranks, places
from purlin_diffusion.commands.timing.measure import measure
from purlin_diffusion.commands.timing.modes import HOWS, Asked
from purlin_diffusion.commands.timing.page import page
from purlin_diffusion.commands.timing.record import append, lines, whole
from purlin_diffusion.commands.timing.rows import Result, summarize
from purlin_diffusion.commands.timing.table import text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--size", metavar="N | WxH", help="pixels, for --width and --height")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each mode (default: 5)")
    parser.add_argument("--warmup", type=int, default=1, help="calls before each timed one (default: 1)")
    parser.add_argument(
        "--how",
        nargs="+",
        choices=HOWS,
        metavar="HOW",
        help=f"{' '.join(HOWS)} beside eager (default: all; on a CPU, where compiling takes a minute, {' '.join(HOWS[:2])})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows, every repeat and the machine there")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append a line of JSON a row there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots and pictures there")


def run(args: argparse.Namespace) -> int:
    return ended("latency", lambda: latency(args))


def latency(args: argparse.Namespace) -> int:
    """Raises InputError before any rank starts, and what a rank raised."""
    options, asked = read(args)
    result = timed(options, asked)
    if result is not None:
        print(text(result))
        write(args, result)
    return DONE


def write(args: argparse.Namespace, result: Result) -> None:
    """The files asked for."""
    if args.json:
        args.json.write_text(json.dumps(whole(result), indent=2) + "\n")
    if args.record:
        append(args.record, lines(result))
    if args.html:
        args.html.write_text(page(result))
        print(f"\nplots and pictures: {args.html}")


def read(args: argparse.Namespace) -> tuple[Options, Asked]:
    """Raises InputError."""
    for name in ("json", "record", "html"):
        if file := getattr(args, name):
            check_writable(f"--{name}", file)
    check_count("--repeats", args.repeats)
    check_count("--warmup", args.warmup)
    if args.size is not None:
        if args.height is not None or args.width is not None:
            raise InputError("--size stands for --width and --height: leave those out")
        args.width, args.height = read_size(args.size)
    options = read_options(args)
    cheap = HOWS[:2] if places(options)[0] == "cpu" else HOWS
    chosen = {HOWS[0], *(args.how or cheap)}  # eager is what all others are compared with
    return options, Asked(args.repeats, args.warmup, tuple(how for how in HOWS if how in chosen))


def read_size(size: str) -> tuple[int, int]:
    """Width and height. Raises InputError."""
    sides = size.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise InputError(f"--size needs pixels, as 1024 or 1024x768 (width x height); got {size!r}")
    return int(sides[0]), int(sides[-1])


def timed(options: Options, asked: Asked) -> Result | None:
    """All visits of all ranks, summarized; None on the ranks of a launcher that are not its root. Raises what a rank raised."""
    visits = on_ranks(measure, options, asked)
    return summarize(options, asked, visits) if visits else None
