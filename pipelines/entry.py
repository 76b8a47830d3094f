"""What a name of a pipeline stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Build(Protocol):
    """Makes the pipeline, in eval mode, its weights of `dtype` on `device`."""

    def __call__(self, *, dtype: torch.dtype, device: torch.device) -> Any: ...


@dataclass(frozen=True)
class Entry:
    """`call`: arguments of the pipeline's call that suit it (never the prompt). `about`: one line for a report."""

    build: Build
    call: Mapping[str, Any]
    dtype: torch.dtype  # when the caller names none
    about: str
