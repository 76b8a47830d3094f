"""From what a user passes to parallelize to sessions that run: all checks first, then ranks, or nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from purlin_diffusion.agreed import agreed
from purlin_diffusion.ahead import loop_of
from purlin_diffusion.beside import beside
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.config import ParallelConfig
from purlin_diffusion.errors import ConfigError, NotBuiltError
from purlin_diffusion.graph.decoding import decoding_of
from purlin_diffusion.graph.policy import Graphs, of_communicator, of_compile
from purlin_diffusion.group_session import GroupSession
from purlin_diffusion.guidance import Manner, unhalved
from purlin_diffusion.handle import Handle
from purlin_diffusion.host_carrier import HostCarrier
from purlin_diffusion.inputs import Carriers
from purlin_diffusion.local_session import LocalSession
from purlin_diffusion.paths import modules_at
from purlin_diffusion.placement import check_free, denoisers, device_of, local_devices, processes, uncompiled
from purlin_diffusion.plan import Plan
from purlin_diffusion.registry import plan_of
from purlin_diffusion.route import Route, announce, open_group
from purlin_diffusion.session import Session
from purlin_diffusion.validate import validate

ULYSSES_RANKS = 4  # from here on ulysses moves at most half of gather_kv's bytes: 4Sh(P-1)/P^2 against 2Sh(P-1)/P


def open_handle(
    pipe_or_model: Any,
    config: ParallelConfig,
    devices: int | Sequence[torch.device | str] | None,
    communicator: Carrier | None,
    *,
    graphs: Graphs | None = None,
) -> Handle:
    """What parallelize() does. `graphs`: a test's, which need no GPU."""
    if devices is not None and communicator is not None:
        raise ConfigError(
            "parallelize: needs `devices` (threads of this process) or `communicator` (ranks that are there); got both."
        )
    graphs = Graphs(config) if graphs is None else graphs
    with ExitStack() as opened:
        handle = _opened(partial(_asked, pipe_or_model, config, graphs), devices, communicator)
        opened.callback(handle.undo)
        handle.decoding = decoding_of(pipe_or_model, config, graphs)
        handle.loop = loop_of(pipe_or_model, handle.sessions)
        opened.pop_all()
    announce(handle.sessions[0].route, handle.graphs_off, rank=handle.rank)
    return handle


def _opened(
    ask: Callable[[], _Asked], devices: int | Sequence[torch.device | str] | None, communicator: Carrier | None
) -> Handle:
    if communicator is not None:
        return _with_communicator(ask(), communicator)
    if processes() > 1:
        return _with_processes(ask, devices)
    return _with_threads(ask(), 1 if devices is None else devices)


def _asked(pipe_or_model: Any, config: ParallelConfig, graphs: Graphs) -> _Asked:
    given = denoisers(pipe_or_model)
    models = [uncompiled(model) for model in given]
    plans = [_plan(pipe_or_model, model) for model in models]
    return _Asked(models, plans, config, graphs, of_compile(*given))


def _plan(pipe_or_model: Any, model: nn.Module) -> Plan:
    check_free(pipe_or_model, model)
    plan = plan_of(model)
    validate(plan, model)
    return plan


@dataclass(frozen=True)
class _Asked:
    """The denoisers to open, and how. `off`: what on them forbids CUDA graphs of ours."""

    models: Sequence[nn.Module]
    plans: Sequence[Plan]
    config: ParallelConfig
    graphs: Graphs
    off: str

    def parts(self, ranks: Sequence[int]) -> Iterator[tuple[nn.Module, Plan, Manner]]:
        """Each denoiser, its plan, and how that many ranks share its calls."""
        for model, plan, count in zip(self.models, self.plans, ranks, strict=True):
            self.config.degrees(count)
            manner = Manner(_mode(model, plan, self.config, count), unhalved(plan, self.config, count))
            yield model, plan, manner


def _mode(model: nn.Module, plan: Plan, config: ParallelConfig, ranks: int) -> str:
    if config.attention != "auto":
        return config.attention
    heads = {getattr(module, "heads", 0) for path in plan.calls for _, module in modules_at(model, path)}
    return "ulysses" if ranks >= ULYSSES_RANKS and all(count % ranks == 0 for count in heads) else "gather_kv"


def _with_threads(asked: _Asked, devices: int | Sequence[torch.device | str]) -> Handle:
    places = [local_devices(model, devices) for model in asked.models]
    parts = list(asked.parts([len(place) for place in places]))
    sessions = _open(
        partial(LocalSession, model, plan, manner, asked.config, place, asked.graphs, asked.off)
        for (model, plan, manner), place in zip(parts, places, strict=True)
    )
    return Handle(sessions, asked.config, at_undo=_nothing)


def _with_processes(ask: Callable[[], _Asked], devices: Any) -> Handle:
    with ExitStack() as opened:
        ours = not dist.is_initialized()
        if ours:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
            opened.callback(dist.destroy_process_group)
        asked, device, parts = agreed("parallelize", lambda: _checked_for_processes(ask, devices))

        def join(model: nn.Module, plan: Plan, manner: Manner) -> Session:
            route, carriers = open_group(asked.config, None, device)
            return GroupSession(
                model, plan, manner, carriers, route, device=device, owned=True, graphs=asked.graphs, off=asked.off
            )

        sessions = _open(partial(join, *part) for part in parts)
        opened.pop_all()
    return Handle(sessions, asked.config, at_undo=dist.destroy_process_group if ours else _nothing)


def _checked_for_processes(
    ask: Callable[[], _Asked], devices: Any
) -> tuple[_Asked, torch.device, list[tuple[nn.Module, Plan, Manner]]]:
    if devices is not None:
        raise ConfigError(
            "parallelize: `devices` is for one process, and a launcher started several. Leave it out: each process holds one rank."
        )
    asked = ask()
    _refuse_for_processes(asked.config)
    return asked, device_of(asked.models[0]), list(asked.parts([processes()] * len(asked.models)))


def _with_communicator(asked: _Asked, communicator: Carrier) -> Handle:
    _refuse_for_processes(asked.config)
    if not isinstance(communicator, Carrier):
        raise ConfigError(
            f"parallelize: `communicator` needs a purlin_core Communicator; got {type(communicator).__name__}."
        )
    device = torch.device(getattr(communicator, "device", "cpu"))
    host = communicator if device.type == "cpu" else HostCarrier(communicator, device)
    route = Route(type(communicator).__name__, f"the caller's own, rank {communicator.rank} of {communicator.ranks}")
    tied = of_communicator(communicator)
    carriers = Carriers(device=beside(communicator, asked.config.overlap, apart=not tied), host=host)
    off = asked.off or tied
    sessions = _open(
        partial(
            GroupSession, model, plan, manner, carriers, route, device=device, owned=False, graphs=asked.graphs, off=off
        )
        for model, plan, manner in list(asked.parts([communicator.ranks] * len(asked.models)))
    )
    return Handle(sessions, asked.config, at_undo=_nothing)


def _open(makers: Iterable[Callable[[], Session]]) -> list[Session]:
    """All sessions, or none."""
    sessions: list[Session] = []
    try:
        for make in makers:
            sessions.append(make())
    except BaseException:
        for session in sessions:
            session.close()
        raise
    return sessions


def _refuse_for_processes(config: ParallelConfig) -> None:
    if config.text == "root":
        raise NotBuiltError(
            'ParallelConfig: text="root" is not built yet for processes. There is text="all", or one process with `devices=`.'
        )


def _nothing() -> None:
    pass
