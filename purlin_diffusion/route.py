"""Who carries the exchanges, and why: purlin where it can, torch.distributed where it cannot or was asked for. One visible line says it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import purlin_core
from purlin_core.errors import PurlinError
from purlin_diffusion.beside import beside
from purlin_diffusion.carrier import Alone, Carrier
from purlin_diffusion.config import ParallelConfig
from purlin_diffusion.environment import node
from purlin_diffusion.errors import ConfigError, NotBuiltError
from purlin_diffusion.inputs import Carriers
from purlin_diffusion.stores import HashStore, PrefixStore
from purlin_diffusion.torch_carrier import own_group
from purlin_diffusion.workers import on_threads

_log = logging.getLogger("purlin_diffusion")

# Of a GPU's memory, for what exchanges bring, which peers write directly while it fits in twice: 2 GiB of an H200, where keys and values of a layer
# of FLUX at 2048 are 198 MiB. What is larger goes the ordinary way, which takes twice as long.
RESULTS_SHARE = 64


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


def open_local(config: ParallelConfig, devices: Sequence[torch.device], *, backend: str) -> tuple[Route, Opened]:
    """Carriers between threads of this process, rank r on devices[r]: all one device, or each another.

    Raises what the core raises where it cannot and no other backend may or could.
    """
    ranks = len(devices)
    where = f"{ranks} threads of this process on {_places(devices)}"
    if ranks == 1:
        alone = Alone()
        return Route("none", "one rank has nothing to exchange"), Opened([alone], alone.close)
    if backend == "torch":
        return Route("torch", f"asked for; {_torch_name(devices[0])} between {where}"), _local_torch(config, devices)
    try:
        return Route("purlin", where), _local_purlin(config, devices)
    except PurlinError as error:
        if backend == "purlin" or share_a_gpu(devices):
            raise
        reason = f"{error}".rstrip(".")
        return Route(
            "torch", f"{_torch_name(devices[0])} between {where}, because purlin cannot: {reason}"
        ), _local_torch(config, devices)


def open_group(config: ParallelConfig, group: Any, device: torch.device) -> tuple[Route, Carriers]:
    """Carriers between the processes of `group` (None: the default one). Collective; all ranks take the same route.

    Raises ConfigError on all of them when they are on several nodes, unless torch is asked for: whether a network may stand between, users say.
    """
    group = dist.group.WORLD if group is None else group
    where = f"{dist.get_world_size(group)} processes on {device.type}"
    if config.backend == "torch":
        return Route("torch", f"asked for; {_torch_name(device)} between {where}"), _group_torch(config, group, device)
    _check_one_node(group)
    try:
        return Route("purlin", where), _group_purlin(config, group, device)
    except PurlinError as error:
        if config.backend == "purlin":
            raise
        reason = f"{error}".rstrip(".")
        return Route("torch", f"{_torch_name(device)} between {where}, because purlin cannot: {reason}"), _group_torch(
            config, group, device
        )


def _check_one_node(group: Any) -> None:
    nodes: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(nodes, node(), group=group)
    if len(set(nodes)) == 1:
        return
    there = "; ".join(
        f"{name}: rank {', '.join(str(rank) for rank, at in enumerate(nodes) if at == name)}"
        for name in dict.fromkeys(nodes)
    )
    raise ConfigError(
        f"parallelize: ranks that draw one picture need to be on one node; got {there}. Give each node pictures of its own:"
        " parallelize(pipe, communicator=purlin_core.Communicator(mesh['rank'], device)), the ranks of one node in it, and prompts split over"
        ' the nodes, as examples/several_nodes.py does; or let a network carry every exchange: ParallelConfig(backend="torch").'
    )


def share_a_gpu(devices: Sequence[torch.device]) -> bool:
    """Whether ranks of this process compute on one GPU."""
    return devices[0].type != "cpu" and len(set(devices)) < len(devices)


def announce(route: Route, graphs_off: str, *, rank: int) -> None:
    """The one visible line, on the root."""
    if rank == 0:
        graphs = "" if graphs_off else "; CUDA graphs from the second call of a shape on"
        _log.warning("purlin_diffusion: exchanges by %s%s", route, graphs)


def _places(devices: Sequence[torch.device]) -> str:
    if share_a_gpu(devices):
        return f"{devices[0]}, which they share"
    return ", ".join(dict.fromkeys(map(str, devices)))


def _local_purlin(config: ParallelConfig, devices: Sequence[torch.device]) -> Opened:
    place = devices[0] if len(set(devices)) == 1 else list(devices)
    world = purlin_core.LocalWorld(len(devices), device=place, timeout=config.timeout, **_results(devices))
    apart = not share_a_gpu(devices)
    return Opened([beside(each, config.overlap, apart=apart) for each in world.communicators], world.close)


def _local_torch(config: ParallelConfig, devices: Sequence[torch.device]) -> Opened:
    if share_a_gpu(devices):
        raise ConfigError(
            f"parallelize: backend 'torch' is NCCL here, which needs a GPU a rank; got {len(devices)} ranks on {devices[0]}."
            " Use backend='purlin', or give each rank a GPU of its own."
        )
    store, ranks = HashStore(), len(devices)

    def join(rank: int) -> Carrier:
        carrier = own_group(store, rank=rank, ranks=ranks, device=devices[rank], timeout=config.timeout)
        return beside(carrier, config.overlap, apart=True)

    carriers = on_threads(ranks, join)

    def close() -> None:
        for carrier in carriers:
            carrier.close()

    return Opened(carriers, close)


def _group_purlin(config: ParallelConfig, group: Any, device: torch.device) -> Carriers:
    """Raises a PurlinError on every rank when one cannot."""
    join = partial(purlin_core.Communicator, group, device, timeout=config.timeout, **_results([device]))
    on_device = beside(_on_all(join, group), config.overlap, apart=True)
    if device.type == "cpu":
        return Carriers(device=on_device, host=on_device)
    try:
        on_host = _on_all(lambda: purlin_core.Communicator(group, timeout=config.timeout), group)
    except PurlinError:
        on_device.close()
        raise
    return Carriers(device=on_device, host=on_host)


def _on_all(join: Callable[[], Carrier], group: Any) -> Carrier:
    """join() on every rank, or a PurlinError on every rank: this one's own, or one that names whose it is. Collective."""
    carrier, error = None, None
    try:
        carrier = join()
    except PurlinError as caught:
        error = caught
    reasons: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, None if error is None else f"rank {dist.get_rank(group)}: {error}", group=group)
    first = next((reason for reason in reasons if reason is not None), None)
    if carrier is not None and first is None:
        return carrier
    if carrier is not None:
        carrier.close()
    raise error or NotBuiltError(f"backend 'purlin' cannot run on every rank: {first}")


def _group_torch(config: ParallelConfig, group: Any, device: torch.device) -> Carriers:
    store = PrefixStore("purlin_diffusion", group.get_group_store())
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    number = store.add(f"count/{rank}", 1)  # a new parallelize never meets an old one's keys
    store = PrefixStore(str(number), store)

    def join(name: str, where: torch.device) -> Carrier:
        carrier = own_group(PrefixStore(name, store), rank=rank, ranks=ranks, device=where, timeout=config.timeout)
        return beside(carrier, config.overlap, apart=True)

    on_cpu = join("host", torch.device("cpu"))
    return Carriers(device=on_cpu if device.type == "cpu" else join("device", device), host=on_cpu)


def _results(devices: Sequence[torch.device]) -> dict[str, Any]:
    """`devices`: of the ranks of this process."""
    if devices[0].type == "cpu":
        return {}
    sharing = max(devices.count(device) for device in devices)
    total = min(torch.cuda.get_device_properties(device).total_memory for device in set(devices))
    return {"heap_bytes": results_bytes(total // sharing), "granted_results": True}


def results_bytes(memory: int) -> int:
    """Of `memory` bytes that a rank may take of a GPU; a power of two, which is the same on GPUs of one kind."""
    return 1 << (memory // RESULTS_SHARE).bit_length() - 1


def _torch_name(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "NCCL"
