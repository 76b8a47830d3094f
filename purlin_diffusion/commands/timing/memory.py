"""The most memory that this process has held since a moment: of its GPUs, as torch allocates it, or resident in a CPU process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

GB = 1e9
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PEAK, RESET_PEAK = "VmHWM:", "5"  # proc(5)


def start(devices: Sequence[str]) -> None:
    """From now on."""
    import torch

    if devices[0] != "cpu":
        for device in set(devices):
            torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        RESET.write_text(RESET_PEAK)
    except OSError:  # then peak_gb() is that of the process's whole life
        return


def peak_gb(devices: Sequence[str]) -> float | None:
    """1e9 bytes, of the GPU that held most; None where the system does not tell."""
    import torch

    if devices[0] != "cpu":
        return max(torch.cuda.max_memory_allocated(device) for device in set(devices)) / GB
    try:
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(PEAK))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024 / GB
