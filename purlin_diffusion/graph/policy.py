"""Why a model gets no graphs at all, known before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from purlin_core import Communicator
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.config import ParallelConfig
from purlin_diffusion.errors import ConfigError
from purlin_diffusion.graph.cuda import CudaPool
from purlin_diffusion.graph.recorder import MakePool, Pool
from purlin_diffusion.graph.state import own_graphs
from purlin_diffusion.graph.store import Limits
from purlin_diffusion.plan import Plan

NONE = "none: "  # how a plan says that its model's forward cannot be recorded, and why


class Graphs:
    """What parallelize decided about graphs. `make_pool`: a test's; None: CUDA graphs, where there is CUDA. `apart`: a test's; see together()."""

    def __init__(self, config: ParallelConfig, make_pool: MakePool | None = None, *, apart: bool = False) -> None:
        self._config, self._make, self._apart = config, make_pool, apart
        self.limits = Limits(config.graph_keys, config.graph_memory)

    def pool(self, device: torch.device) -> Pool:
        return (self._make or CudaPool)(device)

    def together(self, devices: Sequence[torch.device]) -> bool:
        """Whether ranks of one process on `devices` are in one recording: those of one GPU."""
        return len(set(devices)) == 1 and not self._apart

    def why_off(self, device: torch.device, *reasons: str) -> str:
        """Why there are none on `device`, `reasons` among what may forbid them; empty where there are."""
        if self._config.graph is False:
            return "graph=False"
        no_cuda = device.type != "cuda" and self._make is None
        here = f"a CUDA graph needs a GPU, and these ranks compute on the {device.type}" if no_cuda else ""
        return here or next(filter(None, reasons), "")

    def off(self, device: torch.device, *reasons: str) -> str:
        """why_off(). Raises ConfigError where graph=True asks for them."""
        why = self.why_off(device, *reasons)
        if why and self._config.graph is True:
            raise ConfigError(
                f'ParallelConfig: graph=True cannot be: {why}. Use graph="auto", which runs eagerly then.'
            )
        return why


def of_plan(plan: Plan) -> str:
    """Why the forward of a plan's model cannot be recorded."""
    if plan.graph == "blocks":
        return f"{plan.model} can be recorded block by block only, which is not built yet"
    return plan.graph.removeprefix(NONE) if plan.graph.startswith(NONE) else ""


def of_compile(*models: Any) -> str:
    """Why what torch.compile made of a model forbids graphs of ours."""
    return next(filter(None, map(own_graphs, models)), "")


def of_threads(backend: str, ranks: int) -> str:
    """Why ranks of one process cannot record."""
    if backend == "torch" and ranks > 1:
        return "torch.distributed between threads of one process is not recorded"
    return ""


def of_communicator(communicator: Carrier) -> str:
    """Why ranks that bring a communicator of their own cannot record each for itself."""
    if isinstance(communicator, Communicator) and communicator.captured_together:
        return "ranks of one LocalWorld are recorded together only. Use parallelize(..., devices=[...]) in place of a communicator a rank"
    return ""
