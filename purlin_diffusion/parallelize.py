"""The one call: a pipeline or denoiser whose forward runs on several ranks from now on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from purlin_diffusion.carrier import Carrier
from purlin_diffusion.config import ParallelConfig
from purlin_diffusion.errors import ConfigError
from purlin_diffusion.handle import Handle


def parallelize(
    pipe_or_model: Any,
    config: ParallelConfig | None = None,
    *,
    devices: int | Sequence[torch.device | str] | None = None,
    communicator: Carrier | None = None,
) -> Handle:
    """Run the denoiser of a diffusers pipeline (or a bare one) on several ranks, exactly: the same images. Whether it is faster, `latency` shows.

    Under a launcher (torchrun, accelerate launch, purlin_diffusion.launch) each process holds its rank and makes the same calls; inputs come from the
    root. Without one, `devices` says how many devices of this process, or which: worker threads hold replicas, all else stays as it is.
    ["cuda:0"] * n is n ranks on one GPU, which share its weights: to see that it works, not how fast.
    `communicator` takes an existing purlin_core Communicator instead. `config` chooses how; the default chooses for you.

    Returns a Handle with undo(), explain(), counters. Raises ConfigError, NotBuiltError, UnsupportedModelError, PlanError, PlacementError,
    AlreadyParallelError, before anything is changed; SetupError where ranks do not come together.
    """
    config = ParallelConfig() if config is None else config
    if not isinstance(config, ParallelConfig):
        raise ConfigError(
            f"parallelize: `config` needs a ParallelConfig, or None for the default; got {config!r}."
            ' Write ParallelConfig(attention="ulysses"), or devices=2 for a number of ranks.'
        )
    from purlin_diffusion.opening import (
        open_handle,  # brings diffusers, whose import takes seconds: launched ranks need it only from here on
    )

    return open_handle(pipe_or_model, config, devices, communicator)
