"""What both kinds of sessions share: ranks as threads (local_session.py) and as processes (group_session.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from purlin_diffusion.ahead import Ahead
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

    @property
    def ahead(self) -> Ahead: ...

    def counters(self) -> tuple[Counters, ...]: ...

    def check(self) -> None:
        """Wait for all calls that were launched. Raises what they met, as the next call would."""

    def steps_ended(self, error: BaseException | None) -> None:
        """Where a pipeline's steps end, well or by `error`. Collective between processes: all hear what one has met outside of the model."""

    def on_all(self, fn: Callable[[nn.Module], Any]) -> Any: ...

    def close(self) -> None: ...


def refuse_gradients(model: nn.Module) -> None:
    """Raise ArgumentError where a forward would build a graph of gradients, which cannot cross ranks."""
    if torch.is_grad_enabled():
        raise ArgumentError(
            f"{type(model).__name__}.forward: a parallelized model is for inference, and gradients are enabled here."
            " Call it under torch.inference_mode() or torch.no_grad(), as pipelines do."
        )
