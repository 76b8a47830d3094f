"""The environment variables that make a process a rank, as torchrun and accelerate set them."""

from __future__ import annotations

import os
import platform


def node() -> str:
    """The machine that this process is on, as its launcher counts machines: torchrun and accelerate number theirs."""
    number = os.environ.get("GROUP_RANK")
    return platform.node() if number is None else f"{platform.node()} (node {number})"


def launched_ranks() -> int | None:
    """How many ranks the launcher started; None outside one."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def of_rank(rank: int, ranks: int, *, threads: int) -> dict[str, str]:
    """What a launched rank finds. OpenMP reads its count once, when torch is imported: it has to be there from the start."""
    here = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "OMP_NUM_THREADS": threads,
    }
    loopback = (
        {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": "lo"}
    )  # one host, whose name need not resolve
    return {name: str(value) for name, value in here.items()} | loopback
