"""On every rank: the pipeline, what float32 says of it, and the visits of each size in turn."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from purlin_diffusion.commands.exits import InputError
from purlin_diffusion.commands.options import Options, check_size
from purlin_diffusion.commands.picture import call_arguments, load
from purlin_diffusion.commands.ranks import here, place
from purlin_diffusion.commands.timing import memory
from purlin_diffusion.commands.timing.modes import Asked
from purlin_diffusion.commands.timing.opened import Pipes
from purlin_diffusion.commands.timing.rank import Rank, say, told
from purlin_diffusion.commands.timing.truth import Truth, no_room, truths
from purlin_diffusion.commands.timing.visit import Visits, keep

MOST_GRAPHS = 1024  # of one piece of code


def measure(first: Options, sizes: Sequence[Options], asked: Asked, so_far: Path) -> list[Visits]:
    """All visits of each size, in the order in which they were made; of a mode that cannot run the first that says so. `first` of `sizes` says which
    pipeline and where. `so_far`: where the root keeps what there is meanwhile. Raises InputError."""
    for name in ("purlin_diffusion", "diffusers"):  # the table says which route each row took
        logging.getLogger(name).setLevel(logging.ERROR)
    began = time.monotonic()
    pipe = load(first, place(first))
    pipe.set_progress_bar_config(disable=True)
    for options in sizes:
        check_size(pipe, call_arguments(options), "--size" * asked.by_size)
    say(first, began, f"{first.model} is there")
    found = found_truths(pipe, sizes, asked, began)
    done: list[Visits] = []
    for number, options in enumerate(sizes):
        truth = found[number] if found else None
        rank = Rank(options, asked, Pipes(pipe, options), truth, began=began)
        done.append(rank.seen)
        with fresh_compiler():
            rank.visits(lambda: keep(done, so_far))
    return done


def found_truths(pipe: Any, sizes: Sequence[Options], asked: Asked, began: float) -> list[Truth]:
    """On the root, where they are asked for and can be had."""
    first = sizes[0]
    wanted = asked.truth if asked.truth is not None else place(first) != "cpu"
    if not wanted or here(first) != 0:
        return []
    why = no_room(pipe)
    try:
        found = [] if why else truths(pipe, sizes)
    except InputError:
        raise
    except Exception as error:  # without it there are figures still
        found, why = [], told(error)
    memory.give_back()
    say(first, began, f"no errors from float32: {why}" if why else "one rank has drawn in float32")
    return found


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Code compiled for one size is no code for another: it would be made again for all sizes, and be slower. All modes' graphs are kept with the
    code they share, so more are let be than torch allows one program."""
    import torch

    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, accumulated_recompile_limit=MOST_GRAPHS):
        yield
