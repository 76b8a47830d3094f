"""Runs of latency that tests look at: a tiny FLUX, two steps."""

from __future__ import annotations

import argparse

import pytest

from purlin_diffusion.commands import latency
from purlin_diffusion.commands.options import Options
from purlin_diffusion.commands.picture import Seconds
from purlin_diffusion.commands.timing import (
    rows,
)
from purlin_diffusion.commands.timing.likeness import Likeness
from purlin_diffusion.commands.timing.modes import Asked, Mode
from purlin_diffusion.commands.timing.rows import Result
from purlin_diffusion.commands.timing.visit import Visit

TINY = ("--device", "cpu", "--model", "tiny:flux", "--steps", "2", "--seed", "3", "--height", "48", "--width", "64")
NAMES = ("1 rank", "accelerate device_map", "accelerate split prompts", "diffusers ulysses", "diffusers ring (cuDNN)")
OURS = ("ours over torch", "ours")
ASKED = Asked(repeats=1, warmup=1, hows=("eager",))


def read_all(*arguments: str) -> tuple[list[Options], Asked]:
    parser = argparse.ArgumentParser()
    latency.add_arguments(parser)
    return latency.read(parser.parse_args(list(arguments)))


def read(*arguments: str) -> tuple[Options, Asked]:
    (options,), asked = read_all(*arguments)
    return options, asked


def timed(options: Options, asked: Asked = ASKED) -> Result:
    (result,) = latency.timed([options], asked, lambda _: None)
    return result


def measured(*arguments: str) -> Result:
    return timed(read(*TINY, *arguments)[0])


def by_mode(result: Result, how: str = "eager") -> dict[str, rows.Row]:
    return {row.mode.name: row for row in result.rows if row.mode.how == how}


# ---- a run that nobody made
ALONE_1, ALONE_2 = (Mode(f"1 rank ({n})", "alone", "none", "eager", threads=n) for n in (1, 2))
PURLIN, SPLIT = Mode("ours", "ours", "purlin", "eager", 2), Mode("split", "split", "accelerate", "eager", 2)


def of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(rows, "modes", lambda *_: [ALONE_1, ALONE_2, SPLIT, PURLIN])

    def visits(whole: float, *, root: bool) -> list[Visit]:
        first = [Visit(ALONE_1, Seconds(4.0, (2.0,))), Visit(ALONE_2, Seconds(3.0, (1.0,)))]
        idle = [Visit(ALONE_1), Visit(ALONE_2)]
        likeness = Likeness(0.5, 6.0) if root else None
        ours = Visit(PURLIN, Seconds(whole, (whole / 2,)), memory_gb=whole, likeness=likeness)
        return [*(first if root else idle), Visit(SPLIT, Seconds(whole * 4, ()), images=2), ours]

    options, asked = read(*TINY, "--ranks", "2")
    return rows.summarize(options, asked, [visits(1.0, root=True), visits(1.5, root=False)])
