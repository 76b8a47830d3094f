"""The most memory that a mode held: of its GPUs, as torch allocates it, or resident in a CPU process.

What other modes left there (copies of a pipeline, recordings) is no memory of this one: it is taken away, and so are the pipeline's own weights where
a mode has weights of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

GB = 1e9
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PEAK, RESET_PEAK = "VmHWM:", "5"  # proc(5)


def start(devices: Sequence[str], weights: Any) -> dict[str, int]:
    """From now on. Returns the bytes of each GPU that are not the mode's: all there are, but for what the modules `weights` hold."""
    import torch

    if devices[0] != "cpu":
        for device in set(devices):
            torch.cuda.reset_peak_memory_stats(device)
        return {each: max(0, torch.cuda.memory_allocated(each) - held(weights, each)) for each in set(devices)}
    with suppress(OSError):  # then peak_gb() is that of the process's whole life
        RESET.write_text(RESET_PEAK)
    return {}


def peak_gb(devices: Sequence[str], others: Mapping[str, int]) -> float | None:
    """1e9 bytes, of the GPU that held most beside `others`, which start() returned; None where the system does not tell."""
    import torch

    if devices[0] != "cpu":
        return max(torch.cuda.max_memory_allocated(each) - others[each] for each in set(devices)) / GB
    try:
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(PEAK))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024 / GB


def held(modules: Sequence[Any], device: str) -> int:
    """Bytes of the weights on `device`, each once."""
    import torch

    place = torch.device(device)
    tensors = {id(x): x for module in modules for x in (*module.parameters(), *module.buffers()) if x.device == place}
    return sum(x.numel() * x.element_size() for x in tensors.values())


def give_back() -> None:
    """What nobody holds any more, to the GPU: what could not run for want of memory shall not be the next mode's loss."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
