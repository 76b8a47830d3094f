"""How a command's ranks come to be: this process alone, threads of it, processes of its own, or those of a launcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from purlin_diffusion.commands.options import APART, Options, gpus, may_share, parallel_config

T = TypeVar("T")


def on_ranks(work: Callable[..., T], options: Options, *args: Any) -> list[T]:
    """work(options, *args) once a process; what each returned, by rank. Empty on the ranks of a launcher that are not its root.

    Raises what work raised, RankError and LaunchError.
    """
    if options.mode == "launched":
        return on_launched(lambda: work(options, *args), place(options))
    if options.mode == "processes":
        from purlin_diffusion import launch

        return launch(work, options.ranks, options, *args)
    return [work(options, *args)]


def on_launched(work: Callable[[], T], device: str) -> list[T]:
    """The results of all ranks come together on the root."""
    import torch
    import torch.distributed as dist

    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, work())
        return results if dist.get_rank() == 0 else []
    finally:
        dist.destroy_process_group()


def here(options: Options) -> int:
    """This process's rank."""
    return int(os.environ["RANK"]) if options.mode in {"processes", "launched"} else 0


def place(options: Options) -> str:
    """The device of this process's rank; of the first one where ranks are threads."""
    return places(options)[here(options)]


def places(options: Options) -> list[str]:
    """Of every rank: a GPU each where there are as many, the first one for all where threads may share it, else the CPU."""
    if options.device != "cpu" and gpus() >= options.ranks:
        return [f"cuda:{rank}" for rank in range(options.ranks)]
    shared = options.mode not in APART and may_share(options.device)
    return ["cuda:0" if shared else "cpu"] * options.ranks


def sharing(options: Options) -> str:
    """What a figure is worth where ranks share a GPU; empty where they do not."""
    devices = places(options)
    shared = devices[0] != "cpu" and len(set(devices)) < len(devices)
    return f"{options.ranks} ranks share {devices[0]}: this shows that it works, not how fast" if shared else ""


@contextmanager
def parallel(pipe: Any, options: Options, **changes: Any) -> Iterator[Any]:
    """The handle of `pipe` on the ranks of `options` with `changes`; None for one rank, which needs no help."""
    from purlin_diffusion import parallelize

    if options.ranks == 1:
        yield None
        return
    devices = places(options) if options.mode == "threads" else None
    handle = parallelize(pipe, parallel_config(replace(options, **changes)), devices=devices)
    try:
        yield handle
    finally:
        handle.undo()
