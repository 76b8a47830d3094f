"""Ranges with names for profilers: torch.profiler shows them, and under torch.autograd.profiler.emit_nvtx() they are NVTX ranges for Nsight.

torch tells by one flag whether any of its profilers runs; while none does, nothing is made.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler


def named(*parts: str) -> AbstractContextManager[Any]:
    """A range called by `parts`, joined, where a profiler runs; nothing otherwise, nor in what torch.compile traces."""
    if torch.compiler.is_compiling() or not profiler._is_profiler_enabled:
        return nullcontext()
    return profiler.record_function("".join(parts))
