"""Checks of one process that all processes hear of: what one refuses, all do, so that none waits for it in what comes next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from purlin_core.errors import in_words
from purlin_diffusion.errors import RankError
from purlin_diffusion.stores import PrefixStore

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
    said = _met(in_words(error) if error else "")
    if error:
        raise error
    for rank, text in enumerate(said):
        if text:
            raise RankError(f"{call}: rank {rank} refused: {text.rstrip('.')}. Nothing is changed on any rank.", rank)
    return checked


def _met(text: str) -> list[str]:
    """The texts of all ranks. By the group's store: a group of NCCL alone would want to know each rank's GPU first."""
    group: Any = dist.group.WORLD
    store = PrefixStore("purlin_diffusion/agreed", group.get_group_store())
    rank = dist.get_rank()
    turn = store.add(f"turn/{rank}", 1)
    store.set(f"{turn}/{rank}", text)
    return [store.get(f"{turn}/{other}").decode() for other in range(dist.get_world_size())]
