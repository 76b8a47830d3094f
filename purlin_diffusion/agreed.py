"""Checks of one process that all processes hear of: what one refuses, all do, so that none waits for it in what comes next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from purlin_core.errors import in_words
from purlin_diffusion.errors import RankError

T = TypeVar("T")


def agreed(call: str, check: Callable[[], T]) -> T:
    """check() here, when it has passed on every process of the default group. Collective.

    Raises what it raised here; else RankError, of the first rank where it raised.
    """
    error: Exception | None = None
    try:
        checked = check()
    except Exception as raised:
        error = raised
    said: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(said, in_words(error) if error else "")
    if error:
        raise error
    for rank, text in enumerate(said):
        if text:
            raise RankError(f"{call}: rank {rank} refused: {text.rstrip('.')}. Nothing is changed on any rank.", rank)
    return checked
