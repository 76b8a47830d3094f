"""torch.compile around a whole denoiser: what ranks agree on is never traced, and the model's own forward is, on every rank.

Where a model was compiled as a whole, dynamo's callback is on the thread when our root hook is reached. It is taken off the thread there, and put
back for the forward below: on the thread of each rank, so that replicas are compiled as the model is.

Where modules of it were compiled, a replica's are compiled alike. dynamo keeps graphs with the code they were made of, a few for each, and so a
replica runs code of its own: ranks of one process neither see nor use up each other's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.eval_frame import OptimizeContext

from purlin_diffusion.errors import PlacementError

COMPILED = "_compiled_call_impl"  # where nn.Module.compile() leaves its work; no copy takes it along
FORWARD = "forward"
FORCE = "force_compile_during_fx_trace"  # of dynamo's settings, which are a thread's own; where torch has it

Compiler: TypeAlias = Any  # dynamo's callback; None where nothing compiles


class _Paused(threading.local):
    compiler: Compiler = None


_PAUSED = _Paused()


def paused_compiler() -> Compiler:
    """What compiles this thread's root call, while that is paused."""
    return _PAUSED.compiler


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    recursive=False, reason="parallelize: ranks meet at the model's root. Compile the model, and nothing around it."
)
def paused(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """fn(...), and nothing of it is traced. dynamo skips this frame, and would not skip those of what else it called before the compiler is off."""
    compiler = set_eval_frame(None)
    before, _PAUSED.compiler = _PAUSED.compiler, compiler
    try:
        return fn(*args, **kwargs)
    finally:
        _PAUSED.compiler = before
        set_eval_frame(compiler)


def compiled_by(compiler: Compiler, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, traced by `compiler` when it is called."""
    if compiler is None:
        return fn

    def run(*args: Any, **kwargs: Any) -> Any:
        before = set_eval_frame(compiler)
        try:
            return fn(*args, **kwargs)
        finally:
            set_eval_frame(before)

    return run


def is_compiled(model: nn.Module) -> bool:
    """Whether compile() was called on `model` or a module in it."""
    return any(COMPILED in module.__dict__ for module in model.modules())


def compiled_anyway(needed: bool = True) -> AbstractContextManager[Any]:
    """Compiled code runs on this thread, and on those it starts a job on, whatever ranks compile meanwhile on theirs.

    Compilers trace graphs by torch.fx, whose flag for that is the process's: a compiled function that finds it set takes itself for what is traced,
    and refuses. Nothing where torch lacks the setting, or it is not `needed`.
    """
    config = torch._dynamo.config
    return config.patch(FORCE, True) if needed and hasattr(config, FORCE) else nullcontext()


class OwnCode:
    """The functions of one rank: each is its original with code of its own, made once, so that a new replica finds the graphs of the last."""

    def __init__(self) -> None:
        self._own: dict[FunctionType, FunctionType] = {}

    def of(self, function: FunctionType) -> FunctionType:
        if function not in self._own:
            name = f"{function.__name__}_of_rank_{id(self):x}"  # torch tells code apart by file, line and name
            own = FunctionType(
                function.__code__.replace(co_name=name),
                function.__globals__,
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
            own.__kwdefaults__ = function.__kwdefaults__
            own.__dict__.update(function.__dict__)
            self._own[function] = own
        return self._own[function]


def compile_alike(model: nn.Module, replica: nn.Module, own: OwnCode) -> None:
    """Compile what a deep copy of `model` left uncompiled. Raises PlacementError where that cannot be done."""
    for module, twin in zip(model.modules(), replica.modules(), strict=True):
        compiled = module.__dict__.get(COMPILED)
        if module is model or compiled is not None:
            forward = type(twin).forward
            if FORWARD not in twin.__dict__ and isinstance(forward, FunctionType):
                twin.__dict__[FORWARD] = MethodType(own.of(forward), twin)
        if module is not model and compiled is not None:  # the model itself brings its compiler to each call
            twin._compiled_call_impl = _compiler_of(module, compiled)(twin._call_impl)


def _compiler_of(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What compile() of a module made its callable with."""
    cells = getattr(compiled, "__closure__", None) or ()
    for cell in cells:
        if isinstance(cell.cell_contents, OptimizeContext):
            return cell.cell_contents
    raise PlacementError(
        f"parallelize: {type(module).__name__} is compiled in a way that a replica cannot follow ({compiled!r})."
        " Compile it with module.compile() or compile_repeated_blocks(), or start one process a rank (torchrun, purlin_diffusion.launch)."
    )
