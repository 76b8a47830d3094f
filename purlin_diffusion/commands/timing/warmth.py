"""How warm the GPUs were. A cool one is faster: of a run on H200 the first pictures took 852 ms a step, and 880 once it was warm.

Read once a timed call, when its clock has stopped and before anything else. Temperature and power are slow enough for that: the die cools over
seconds, and what NVML calls the power is a second's average since Ampere (A100's is of the moment). The SM clock is of the moment, too: a power cap
lets go of it as soon as the GPU has nothing to do, and what holds it down is "idle" from then on. Both would tell of the time after the call, and are
not read.

NVML is asked through the driver's library, as torch does to count devices, and for a GPU by its uuid. torch.cuda.temperature would need nvidia-ml-py,
which torch does not bring, and takes CUDA's numbers for NVML's, which they are only in the order of the bus (CUDA_DEVICE_ORDER).
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

NVML = "libnvidia-ml.so.1"
DIE = 0  # nvml.h: NVML_TEMPERATURE_GPU
UNITS = {"temperature_c": "C", "power_w": "W"}  # of the fields of Warmth
MUCH_C = 10  # cooler by more than this is no fair comparison


@dataclass(frozen=True)
class Warmth:
    """Of one GPU, right after a call; None is what NVML does not say."""

    temperature_c: int | None = None
    power_w: float | None = None


Warmths: TypeAlias = Sequence[Sequence[Warmth]]  # [repeat][GPU]


# ---- read ------------------------------------------------------------------------------------------------------------
def read(devices: Iterable[str]) -> tuple[Warmth, ...]:
    """Of each GPU among torch's `devices` once; none of a CPU. Raises nothing."""
    gpus = [device for device in dict.fromkeys(devices) if device != "cpu"]
    return tuple(map(_of, gpus))


def _of(device: str) -> Warmth:
    import torch

    try:
        nvml: Any = ctypes.CDLL(NVML)
        gpu = ctypes.c_void_p()
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(gpu)):
            return Warmth()  # NVML stays open: to open it takes long, to open it again does not
        temperature = _asked(lambda answer: nvml.nvmlDeviceGetTemperature(gpu, DIE, answer))
        power_mw = _asked(lambda answer: nvml.nvmlDeviceGetPowerUsage(gpu, answer))
    except Exception:  # no NVML, or another one: nothing that a run should end for
        return Warmth()
    return Warmth(temperature, None if power_mw is None else power_mw / 1e3)


def _asked(ask: Callable[[Any], int]) -> int | None:
    """What ask(answer) wrote there; None where it returned an error."""
    answer = ctypes.c_uint()
    return None if ask(ctypes.byref(answer)) else answer.value


# ---- tell ------------------------------------------------------------------------------------------------------------
def on_record(repeats: Warmths) -> dict[str, list[list[float | None]] | None]:
    """[repeat][GPU], by rank, of each field; None where nothing is known."""
    fields = {name: [[getattr(gpu, name) for gpu in repeat] for repeat in repeats] for name in UNITS}
    return {name: every if _known(every) else None for name, every in fields.items()}


def said(modes: Mapping[str, Warmths]) -> list[str]:
    """A line, of all modes together; none where there is no GPU."""
    if not any(gpu for repeats in modes.values() for gpu in repeats):
        return []
    fields = on_record([repeat for repeats in modes.values() for repeat in repeats])
    known = [(_known(every), UNITS[name]) for name, every in fields.items() if every]
    spans = [f"{min(figures):.0f} to {max(figures):.0f} {unit}" for figures, unit in known]
    return [f"GPUs, after each timed call: {', '.join(spans) or 'warmth not known'}."]


def unlike(modes: Mapping[str, Warmths]) -> list[str]:
    """A line, where there are modes to which cooler GPUs may have been a help."""
    cool = "; ".join(f"{mode} ({by:.0f} C)" for mode, by in cooler(modes).items() if by > MUCH_C)
    unfair = f"Not alike: by medians the same GPU was cooler than in its warmest mode in {cool}"
    return [f"{unfair}. A cool GPU is faster; a larger --warmup may even it out."] * bool(cool)


def cooler(modes: Mapping[str, Warmths]) -> dict[str, float]:
    """By how many C each mode's GPUs were cooler than the same in the mode that had them warmest, at most; medians over repeats, as the times are.
    GPUs are not compared with each other: they sit in unlike places."""
    medians = {mode: _medians(repeats) for mode, repeats in modes.items()}
    warmest: dict[int, float] = {}
    for mine in medians.values():
        warmest |= {gpu: max(there, warmest.get(gpu, there)) for gpu, there in mine.items()}
    return {mode: max(warmest[gpu] - there for gpu, there in mine.items()) for mode, mine in medians.items() if mine}


def _medians(repeats: Warmths) -> dict[int, float]:
    """C, of each GPU of which it is known."""
    every = ([gpu.temperature_c for gpu in of_gpu] for of_gpu in zip(*repeats, strict=False))
    return {gpu: statistics.median(known) for gpu, of_gpu in enumerate(every) if (known := _known([of_gpu]))}


def _known(every: Iterable[Iterable[float | None]]) -> list[float]:
    return [each for some in every for each in some if each is not None]
