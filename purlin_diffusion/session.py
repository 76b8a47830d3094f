"""What both kinds of sessions share: ranks as threads (local_session.py) and as processes (group_session.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from purlin_diffusion.carrier import Carrier
from purlin_diffusion.counters import Counters
from purlin_diffusion.errors import ArgumentError
from purlin_diffusion.route import Route
from purlin_diffusion.sharded import ShardedModel


class Session(Protocol):
    """One parallel model, and the ranks that this process holds."""

    rank: int
    ranks: int
    route: Route

    @property
    def sharded(self) -> ShardedModel: ...

    @property
    def carriers(self) -> Sequence[Carrier]: ...

    @property
    def graphs_off(self) -> str: ...

    def counters(self) -> tuple[Counters, ...]: ...

    def on_all(self, fn: Callable[[nn.Module], Any]) -> Any: ...

    def close(self) -> None: ...


def settle(carrier: Carrier, device: torch.device) -> None:
    """At the end of a root call: raise what an exchange met on a GPU, of which the host hears only when the GPU is done.

    Without this the last step's failure would be heard after its image had left. Once a step, when all of it has been launched, so the GPU idles
    for no more than what a scheduler takes.
    """
    if device.type == "cuda" and carrier.ranks > 1 and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
        carrier.check()


def refuse_gradients(model: nn.Module) -> None:
    """Raise ArgumentError where a forward would build a graph of gradients, which cannot cross ranks."""
    if torch.is_grad_enabled():
        raise ArgumentError(
            f"{type(model).__name__}.forward: a parallelized model is for inference, and gradients are enabled here."
            " Call it under torch.inference_mode() or torch.no_grad(), as pipelines do."
        )
