"""Two funnels that lead every attention of a planned processor to one function: diffusers' attention registry, and torch's own attention.

The registry's entries are wrapped once a process and ask the thread's scope; with no scope open they are what they were. In eager mode the
TorchFunctionMode costs about 0.1 ms an attention, so it is entered only for processors that do not dispatch. Whether torch.compile traces is asked of
dynamo: torch.compiler.is_compiling() is true in every thread while one compiles.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor
from torch.overrides import TorchFunctionMode

from purlin_diffusion.attention.layout import AttentionLayout
from purlin_diffusion.attention.task import DISPATCH, TORCH, Attend, Form
from purlin_diffusion.errors import ArgumentError

ShardedAttention: TypeAlias = Callable[[Tensor, Tensor, Tensor, "Tensor | None", AttentionLayout, Attend, Form], Tensor]

BACKEND = "_purlin_backend"
_SDPA = F.scaled_dot_product_attention


class Visitor(Protocol):
    """A processor's run, see processors.Visit."""

    busy: bool

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Attend, form: Form) -> Tensor: ...


class _Scope(threading.local):
    visit: Visitor | None = None


class _Users:
    """How many parallelized models need the wrapped entries."""

    def __init__(self) -> None:
        self.lock, self.count = threading.RLock(), 0  # re-entered by a finaliser that runs meanwhile


_SCOPE, _USERS = (
    _Scope(),
    _Users(),
)  # what the registry's entries share; a registry that is one a process leaves no other place


class _Tracing:
    """What takes the place of a thread's scope while torch.compile traces, one trace at a time. No code that runs ever sees a visit here."""

    visit: Visitor | None = None


_TRACING = _Tracing()


class _TracedScope:
    def __init__(self, visit: Visitor) -> None:
        self.visit = visit

    def __enter__(self) -> None:
        _TRACING.visit = self.visit

    def __exit__(self, *_: object) -> None:
        _TRACING.visit = None


def scope(visit: Visitor) -> AbstractContextManager[None]:
    """Lead this thread's dispatched attentions to `visit`."""
    return _TracedScope(visit) if torch.compiler.is_dynamo_compiling() else _open_scope(visit)


@contextmanager
def _open_scope(visit: Visitor) -> Iterator[None]:
    before, _SCOPE.visit = _SCOPE.visit, visit
    try:
        yield
    finally:
        _SCOPE.visit = before


class SdpaFunnel(TorchFunctionMode):
    """Leads torch's scaled_dot_product_attention to a visit. torch.compile traces through it and leaves nothing of it."""

    def __init__(self, visit: Visitor) -> None:
        super().__init__()
        self.visit = visit

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA and not self.visit.busy:
            return _visit_sdpa(self.visit, *args, **kwargs)
        if func is torch.Tensor.unflatten:  # called through the mode it would break dynamo's graph
            return args[0].unflatten(*args[1:], **kwargs)
        return func(*args, **kwargs)


def open_registry() -> None:
    """Wrap the entries of diffusers' attention registry, for one model more."""
    with _USERS.lock:
        _USERS.count += 1
        wrap_entries()


def close_registry() -> None:
    """For one model less; the last to leave puts the plain entries back."""
    with _USERS.lock:
        _USERS.count -= 1
        if _USERS.count == 0:
            _replace_entries(lambda backend: getattr(backend, BACKEND, backend))


def wrap_entries() -> None:
    """Wrap the registry's entries that are not wrapped yet."""
    _replace_entries(lambda backend: backend if hasattr(backend, BACKEND) else _funnel(backend))


def _replace_entries(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    backends = _AttentionBackendRegistry._backends
    for name, backend in list(backends.items()):
        backends[name] = change(backend)


def _funnel(backend: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backend)
    def entry(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        visit = _TRACING.visit if torch.compiler.is_dynamo_compiling() else _SCOPE.visit
        if visit is None or visit.busy:
            return backend(query, key, value, **kwargs)
        return _visit_backend(visit, backend, query, key, value, **kwargs)

    setattr(entry, BACKEND, backend)
    return entry


def _visit_backend(
    visit: Visitor, backend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
) -> Tensor:
    masked = "attn_mask" in kwargs  # not every backend takes one
    mask = kwargs.pop("attn_mask", None)
    _refuse(kwargs.get("is_causal"), kwargs.get("dropout_p"), kwargs.get("return_lse"))

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        return backend(q, k, v, **kwargs, **({"attn_mask": mask} if masked else {}))

    return visit.attend(query, key, value, mask, call, DISPATCH)


def _visit_sdpa(
    visit: Visitor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    _refuse(is_causal, dropout_p, None)

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return _SDPA(q, k, v, attn_mask=mask, **kwargs)

    return visit.attend(query, key, value, attn_mask, call, TORCH)


def _refuse(is_causal: bool | None, dropout_p: float | None, return_lse: bool | None) -> None:
    if is_causal or dropout_p or return_lse:
        raise ArgumentError(
            "sharded_attention: needs attention without a causal rule, dropout or log-sum-exp; got"
            f" is_causal={is_causal}, dropout_p={dropout_p}, return_lse={return_lse}."
            " Write a causal rule as a mask over all tokens; call model.eval() against dropout."
        )
