"""Who carries the exchanges, and why: purlin where it can, torch.distributed where it cannot or was asked for. One visible line says it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import purlin_core
from purlin_core.errors import PurlinError
from purlin_diffusion.carrier import Alone, Carrier
from purlin_diffusion.config import ParallelConfig
from purlin_diffusion.errors import NotBuiltError
from purlin_diffusion.inputs import Carriers
from purlin_diffusion.stores import HashStore, PrefixStore
from purlin_diffusion.torch_carrier import own_group
from purlin_diffusion.workers import on_threads

_log = logging.getLogger("purlin_diffusion")


@dataclass(frozen=True)
class Route:
    """What carries the exchanges, and the reason."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


@dataclass(frozen=True)
class Opened:
    """The carriers of the ranks of this process, by rank, and how to close them."""

    carriers: Sequence[Carrier]
    close: Callable[[], None]


def open_local(config: ParallelConfig, ranks: int, device: torch.device, *, backend: str) -> tuple[Route, Opened]:
    """Carriers between threads of this process. Raises what the core raises when backend is "purlin" and it cannot."""
    where = f"{ranks} threads of this process on {device.type}"
    if ranks == 1:
        alone = Alone()
        return Route("none", "one rank has nothing to exchange"), Opened([alone], alone.close)
    if backend == "torch":
        return Route("torch", f"asked for; {_torch_name(device)} between {where}"), _local_torch(config, ranks, device)
    try:
        return Route("purlin", where), _local_purlin(config, ranks, device)
    except PurlinError as error:
        if backend == "purlin":
            raise
        reason = f"{error}".rstrip(".")
        return Route("torch", f"{_torch_name(device)} between {where}, because purlin cannot: {reason}"), _local_torch(
            config, ranks, device
        )


def open_group(config: ParallelConfig, group: Any, device: torch.device) -> tuple[Route, Carriers]:
    """Carriers between the processes of `group` (None: the default one). Collective; all ranks take the same route."""
    group = dist.group.WORLD if group is None else group
    where = f"{dist.get_world_size(group)} processes on {device.type}"
    if config.backend == "torch":
        return Route("torch", f"asked for; {_torch_name(device)} between {where}"), _group_torch(config, group, device)
    carrier, error = _try_purlin(config, group, device)
    reasons: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, None if error is None else f"rank {dist.get_rank(group)}: {error}", group=group)
    first = next((reason for reason in reasons if reason is not None), None)
    if first is None and carrier is not None:
        return Route("purlin", where), Carriers(device=carrier, host=carrier)
    if carrier is not None:
        carrier.close()
    if config.backend == "purlin":
        raise error or NotBuiltError(f"parallelize: backend 'purlin' cannot run on every rank: {first}")
    return Route(
        "torch", f"{_torch_name(device)} between {where}, because purlin cannot: {first}".rstrip(".")
    ), _group_torch(config, group, device)


def announce(route: Route, *, rank: int) -> None:
    """The one visible line, on the root."""
    if rank == 0:
        _log.warning("purlin_diffusion: exchanges by %s", route)


def _local_purlin(config: ParallelConfig, ranks: int, device: torch.device) -> Opened:
    world = purlin_core.LocalWorld(ranks, device=device, timeout=config.timeout)
    return Opened(world.communicators, world.close)


def _local_torch(config: ParallelConfig, ranks: int, device: torch.device) -> Opened:
    store = HashStore()

    def join(rank: int) -> Carrier:
        here = device if device.type == "cpu" else torch.device(device.type, (device.index or 0) + rank)
        return own_group(store, rank=rank, ranks=ranks, device=here, timeout=config.timeout)

    carriers = on_threads(ranks, join)

    def close() -> None:
        for carrier in carriers:
            carrier.close()

    return Opened(carriers, close)


def _try_purlin(config: ParallelConfig, group: Any, device: torch.device) -> tuple[Carrier | None, Exception | None]:
    try:
        return purlin_core.Communicator(group, device, timeout=config.timeout), None
    except PurlinError as error:
        return None, error


def _group_torch(config: ParallelConfig, group: Any, device: torch.device) -> Carriers:
    store = PrefixStore("purlin_diffusion", group.get_group_store())
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    number = store.add(f"count/{rank}", 1)  # a new parallelize never meets an old one's keys
    store = PrefixStore(str(number), store)
    on_cpu = own_group(
        PrefixStore("host", store), rank=rank, ranks=ranks, device=torch.device("cpu"), timeout=config.timeout
    )
    if device.type == "cpu":
        return Carriers(device=on_cpu, host=on_cpu)
    on_device = own_group(PrefixStore("device", store), rank=rank, ranks=ranks, device=device, timeout=config.timeout)
    return Carriers(device=on_device, host=on_cpu)


def _torch_name(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "NCCL"
