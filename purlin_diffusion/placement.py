"""Where a denoiser is and where its ranks shall be: what parallelize accepts, and what it refuses with advice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from purlin_core.opening import MAX_RANKS
from purlin_diffusion.doors import is_hooked, runs_diffusers_parallelism
from purlin_diffusion.environment import launched_ranks
from purlin_diffusion.errors import AlreadyParallelError, ConfigError, PlacementError, UnsupportedModelError
from purlin_diffusion.hooked import refuse_before_replicas
from purlin_diffusion.registry import supported

DENOISERS = ("transformer", "transformer_2", "unet")  # what diffusers' pipelines call them
KINDS = ("cpu", "cuda")  # types of device that ranks compute on


def denoisers(pipe_or_model: Any) -> list[nn.Module]:
    """The modules to parallelize: the model itself, or the pipeline's denoisers, compiled or not: see uncompiled(). Raises UnsupportedModelError."""
    if isinstance(pipe_or_model, nn.Module):
        found = [pipe_or_model]
    else:
        components = getattr(pipe_or_model, "components", None) or {}
        found = [components[name] for name in DENOISERS if isinstance(components.get(name), nn.Module)]
    if not found:
        raise UnsupportedModelError(
            f"parallelize: needs a diffusers pipeline with a denoiser ({', '.join(DENOISERS)}), or a denoiser;"
            f" got {type(pipe_or_model).__name__}. Supported: {', '.join(supported())}."
        )
    return found


def uncompiled(model: nn.Module) -> nn.Module:
    """What torch.compile(model) wraps; the model itself where nothing does."""
    return getattr(model, "_orig_mod", model)


def check_free(pipe_or_model: Any, model: nn.Module) -> None:
    """Raise AlreadyParallelError or PlacementError when something else has a hand on `model`."""
    name = type(model).__name__
    if is_hooked(model):
        raise AlreadyParallelError(
            f"parallelize: this {name} is parallel already (a pipeline that shares it is, too). Call undo() on the handle it gave, then again."
        )
    for holder in (pipe_or_model, model):
        if getattr(holder, "hf_device_map", None):
            raise PlacementError(
                f"parallelize: {type(holder).__name__} is spread by a device map ({holder.hf_device_map})."
                " Load it without device_map, or call reset_device_map(), and move it to one device with .to(...)."
            )
    if runs_diffusers_parallelism(model):
        raise PlacementError(
            f"parallelize: {name} runs diffusers' own parallelism (enable_parallelism). Load it anew without."
        )
    devices = {x.device for x in model.parameters()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        raise PlacementError(
            f"parallelize: {name} needs all weights on one device; got {sorted(map(str, devices))}. Move it with .to(...)."
        )


def device_of(model: nn.Module) -> torch.device:
    """Where the weights are; the CPU for a model without any."""
    return next((x.device for x in model.parameters()), torch.device("cpu"))


def local_devices(model: nn.Module, devices: int | Sequence[torch.device | str]) -> list[torch.device]:
    """A device a rank of this process, the model's own first. Raises ConfigError and PlacementError."""
    here = device_of(model)
    if here.type not in KINDS:
        raise PlacementError(
            f"parallelize: {type(model).__name__} needs its weights on a device that ranks can compute on ({', '.join(KINDS)});"
            f" got {here}. Move it with .to(...)."
        )
    chosen = _count(here, devices) if isinstance(devices, int) else [_indexed(device) for device in _named(devices)]
    if chosen[0] != _indexed(here):
        raise PlacementError(
            f"parallelize: the first of `devices` needs to be the model's own, {here}; got {chosen[0]}. Move it with .to(...)."
        )
    if {device.type for device in chosen} != {here.type} or len(set(chosen)) not in (1, len(chosen)):
        raise ConfigError(
            f"parallelize: `devices` needs devices of one type, all different or all the same; got {[str(device) for device in chosen]}."
            f" For ranks that share the model's own: devices=['{_indexed(here)}'] * {len(chosen)}."
        )
    refuse_before_replicas(model)
    return chosen


def processes() -> int:
    """How many ranks torchrun, accelerate launch, purlin_diffusion.launch or the user's own init_process_group made of processes; 1 without."""
    return dist.get_world_size() if dist.is_initialized() else launched_ranks() or 1


def _named(devices: Any) -> list[torch.device]:
    """What a user listed, each a device that is there. Raises ConfigError."""
    if isinstance(devices, str | torch.device):
        raise _not_devices(f"'{devices}', a single device", f"For two ranks on it: devices=['{devices}'] * 2.")
    if not isinstance(devices, Sequence) or isinstance(devices, bytes | bytearray | memoryview):
        raise _not_devices(repr(devices), "For two ranks: devices=2.")
    _check_ranks(len(devices), devices)
    return [_named_one(each) for each in devices]


def _named_one(each: Any) -> torch.device:
    kinds = "'cpu', 'cuda' or 'cuda:0'"
    if not isinstance(each, str | torch.device):
        raise _not_devices(f"{each!r} among them", f"Name each as a text like {kinds}, or as a torch.device.")
    try:
        device = torch.device(each)
    except RuntimeError as error:  # torch's list of all types that it knows would hide ours
        raise _not_devices(f"{each!r} among them", f"Name each as a text like {kinds}.") from error
    if device.type not in KINDS:
        raise _not_devices(f"'{device}' among them", f"Ranks compute on {' and '.join(KINDS)} only.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"parallelize: `devices` needs GPUs that torch sees, {torch.cuda.device_count()}; got '{device}'."
            " Name those that are there, or for a model on the CPU give a count: devices=2."
        )
    return device


def _not_devices(came: str, cure: str) -> ConfigError:
    return ConfigError(f"parallelize: `devices` needs a count of 1 or more, or a list of devices; got {came}. {cure}")


def _check_ranks(ranks: int, devices: Any) -> None:
    if ranks < 1:
        raise _not_devices(repr(devices), "For two ranks: devices=2.")
    if ranks > MAX_RANKS:
        raise ConfigError(f"parallelize: `devices` needs at most {MAX_RANKS} ranks; got {ranks}. Give fewer.")


def _count(here: torch.device, count: int) -> list[torch.device]:
    if isinstance(count, bool):
        raise _not_devices(repr(count), "For two ranks: devices=2.")
    _check_ranks(count, count)
    if here.type == "cpu":
        return [here] * count
    there = torch.cuda.device_count() if here.type == "cuda" else 1
    if count > there:
        advice = f" For ranks that share one GPU, name it once a rank: devices=['{_indexed(here)}'] * {count}."
        raise ConfigError(
            f"parallelize: devices={count} needs as many {here.type} devices; there are {there}.{advice * (here.type == 'cuda')}"
        )
    first = _indexed(here)
    others = [device for device in (torch.device(here.type, i) for i in range(there)) if device != first]
    return [first, *others[: count - 1]]


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return torch.device("cpu")
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())
