"""What makes a model the same to a graph, and what on it forbids one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from purlin_diffusion.compiler import COMPILED
from purlin_diffusion.doors.seen import hooks_and_forwards
from purlin_diffusion.replica import fingerprint

CONFIG = "get_compiler_config"  # on what torch.compile returns
WRAPPED = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")  # by torch's version


@dataclass(frozen=True)
class ModelState:
    """`fingerprint`: where weights lie, which modules and processors there are, and their numbers. `forwards`: those put on modules, and hooks."""

    fingerprint: Hashable
    forwards: Hashable


def state_of(model: nn.Module) -> tuple[ModelState, str]:
    """What must be equal for a graph of `model` to be true, and why there can be none; empty if there can."""
    foreign, forwards = "", []
    for somebody_elses, found in hooks_and_forwards(model):
        forwards.append(found)
        if somebody_elses:
            foreign = f"{type(found).__name__} is hooked into its modules (a cache, an offload, a casting), which Python must run"
    return ModelState(fingerprint(model), tuple(forwards)), foreign


def own_graphs(model: Any, compiler: Any = None) -> str:
    """Why ours step aside for graphs that torch.compile makes of `model` or a module in it, or `compiler` of the whole; empty where none are made."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    compiled = [model, _backend(compiler), *(module.__dict__.get(COMPILED) for module in modules)]
    if any(_has_graphs(each) for each in compiled if each is not None):
        return 'torch.compile makes its own (mode="reduce-overhead", or triton.cudagraphs), and a graph cannot be made of graphs'
    return ""


def _backend(compiler: Any) -> Any:
    """What dynamo's callback was made for, below what dynamo wraps it in."""
    while not hasattr(compiler, CONFIG) and (
        below := next(filter(None, (getattr(compiler, n, None) for n in WRAPPED)), None)
    ):
        compiler = below
    return compiler


def _has_graphs(compiled: Any) -> bool:
    """What torch.compile returned keeps its options; those it was given none for are inductor's."""
    if not hasattr(compiled, CONFIG):
        return False
    options = compiled.get_compiler_config()
    if options is None:
        return bool(torch._inductor.config.triton.cudagraphs)
    return bool(options.get("triton.cudagraphs"))
