"""Draw a picture on one or several ranks, and write beside it what ran."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from purlin_diffusion.commands.exits import DONE, InputError, ended
from purlin_diffusion.commands.files import check_writable, in_folder
from purlin_diffusion.commands.machine import cores, versions
from purlin_diffusion.commands.options import (
    Options,
    add_model_arguments,
    check_count,
    check_size,
    read_options,
)
from purlin_diffusion.commands.picture import Seconds, call, call_arguments, load
from purlin_diffusion.commands.ranks import here, on_ranks, parallel, place, sharing

FORMATS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tiff"}
SMALL, VIEWABLE = 128, 280  # pixels: pictures below the first are shown at about the second


@dataclass(frozen=True)
class Report:
    """What one process saw. `tokens` and `sent_bytes` have an entry for each of its ranks."""

    pipeline: str
    device: str
    route: str
    explain: str
    load_s: float
    seconds: Seconds
    size: tuple[int, int]
    pictures: tuple[str, ...]
    arguments: dict[str, Any]
    tokens: tuple[dict[str, int], ...]
    sent_bytes: tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--backend", default="auto", help="auto | purlin | torch (default: auto)")
    parser.add_argument("--images", type=int, default=1, help="pictures of the prompt (default: 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/picture.png"), help="where to write (default: %(default)s)"
    )
    parser.add_argument(
        "--scale", type=int, help="enlarge the file so many times, to look at (default: as small ones need)"
    )


def run(args: argparse.Namespace) -> int:
    return ended("generate", lambda: generate(args))


def generate(args: argparse.Namespace) -> int:
    """Raises InputError before any rank starts, and what a rank raised."""
    check_count("--scale", args.scale)
    options = read_options(args)
    check_out(args.out, options.images)
    reports = on_ranks(draw, options, args.out, args.scale)
    if reports:
        written = record(options, reports)
        beside = args.out.with_suffix(".json")
        in_folder(beside).write_text(json.dumps(written, indent=2) + "\n")
        print(summary(written, beside))
    return DONE


def check_out(out: Path, images: int) -> None:
    """Every file that will be written. Raises InputError."""
    if out.suffix.lower() not in FORMATS:
        raise InputError(f"--out needs a name that ends in one of {', '.join(sorted(FORMATS))}; got {out}")
    for file in chain(pictures(out, images), [out.with_suffix(".json")]):
        check_writable("--out", file)


def pictures(out: Path, images: int) -> Iterator[Path]:
    """One file an image: NAME.png, NAME-2.png, ..."""
    yield out
    yield from (out.with_stem(f"{out.stem}-{number}") for number in range(2, images + 1))


# ---- on every rank ---------------------------------------------------------------------------------------------------
def draw(options: Options, out: Path, scale: int | None) -> Report:
    """Load, draw, and on the root save."""
    began = time.perf_counter()
    device = place(options)
    pipe = load(options, device)
    load_s = time.perf_counter() - began
    root = here(options) == 0
    pipe.set_progress_bar_config(disable=not root)
    arguments = call_arguments(options)
    check_size(pipe, arguments)
    with parallel(pipe, options) as handle:
        images, seconds = call(pipe, arguments, seed=options.seed)
        return Report(
            pipeline=type(pipe).__name__,
            device=device.partition(":")[0],
            route=handle.route if handle else "one rank exchanges nothing",
            explain=handle.explain() if handle else "",
            load_s=load_s,
            seconds=seconds,
            size=images[0].size,
            pictures=save(images, out, scale) if root else (),
            arguments=arguments,
            tokens=tuple(dict(counters.tokens) for counters in handle.counters) if handle else (),
            sent_bytes=tuple(each.sent_bytes for each in handle.stats) if handle else (),
        )


def save(images: Sequence[Any], out: Path, scale: int | None) -> tuple[str, ...]:
    """Returns the names of the files."""
    from PIL import Image

    paths = list(pictures(out, len(images)))
    for image, path in zip(images, paths, strict=True):
        times = scale or max(1, VIEWABLE // min(image.size)) if min(image.size) < SMALL or scale else 1
        image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST).save(in_folder(path))
    return tuple(map(str, paths))


# ---- on the root -----------------------------------------------------------------------------------------------------
def record(options: Options, reports: Sequence[Report]) -> dict[str, Any]:
    """What ran, for the JSON beside the picture. Times are the root's, of a first call: what it sets up is included."""
    root = reports[0]
    return {
        "pictures": root.pictures,
        "prompt": options.prompt,
        "model": options.model,
        "pipeline": root.pipeline,
        "arguments": root.arguments,
        "seed": options.seed,
        "pixels": root.size,
        "ranks": options.ranks,
        "mode": options.mode,
        "device": root.device,
        "sharing": sharing(options),
        "route": root.route,
        "attention": options.attention,
        "seconds": {
            "load": root.load_s,
            "whole": root.seconds.whole,
            "step": root.seconds.step,
            "steps": root.seconds.steps,
        },
        "tokens": [tokens for report in reports for tokens in report.tokens],
        "sent_bytes": [sent for report in reports for sent in report.sent_bytes],
        "explain": root.explain.splitlines(),
        "versions": versions(),
        "cores": cores(),
        "options": asdict(options),
    }


def summary(written: dict[str, Any], beside: Path) -> str:
    """The picture's path, and the numbers beside it."""
    seconds, ranks = written["seconds"], written["ranks"]
    step = f", {seconds['step'] * 1e3:.1f} ms a step" if seconds["step"] is not None else ""
    lines = [
        "\n".join(written["pictures"]),
        f"  {written['prompt']!r} by {written['pipeline']} ({written['model']}), seed {written['seed']},"
        f" {'x'.join(map(str, written['pixels']))} pixels",
        f"  {ranks} rank{'s' * (ranks > 1)} on {written['device']} ({written['mode']}): {written['route']}",
        f"  {seconds['whole']:.2f} s{step}; loading took {seconds['load']:.2f} s",
    ]
    if written["sharing"]:
        lines.append(f"  {written['sharing']}")
    if written["sent_bytes"]:
        lines.append(f"  {sum(written['sent_bytes']):,} bytes exchanged; {tokens_line(written['tokens'])}")
    return "\n".join([*lines, f"  all of it: {beside}"])


def tokens_line(tokens: Sequence[dict[str, int]]) -> str:
    shares = [f"{name} {' + '.join(str(each[name]) for each in tokens)}" for name in tokens[0]]
    return f"tokens computed, rank by rank: {', '.join(shares)}"
