"""Attention processors, which stay the objects they are: their class becomes a subclass of itself that looks for a Site on its attention module."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from purlin_core.ranges import named
from purlin_diffusion.attention.layout import Calls
from purlin_diffusion.attention.task import Attend, Form
from purlin_diffusion.doors.funnels import SdpaFunnel, ShardedAttention, scope
from purlin_diffusion.errors import PlanError

SITE = "_purlin_site"
PLAIN = "_purlin_plain"


@dataclass(frozen=True)
class Site:
    """What the attention modules of one plan path do. It hangs on the module, for SD3.5 shares one processor between two; all blocks share one Site,
    so that nothing Python reads inside a block differs from block to block."""

    path: str
    calls: Calls
    attention: ShardedAttention


class Visit:
    """One run of a processor: which attention call comes next, and whether one is under way."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.calls = 0
        self.busy = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Attend, form: Form) -> Tensor:
        layout = self.site.calls[self.calls]
        self.calls += 1
        self.busy = True
        try:
            with named("purlin attention at ", self.site.path):
                return self.site.attention(q, k, v, mask, layout, call, form)
        finally:
            self.busy = False


def place(module: nn.Module, site: Site) -> Any:
    """Hang `site` on an attention module and let its processor see it. Returns the processor. Raises PlanError."""
    processor: Any = getattr(module, "processor", None)
    kind: Any = type(processor)
    if not hasattr(kind, PLAIN):
        try:
            processor.__class__ = sharded_class(kind)
        except TypeError as error:
            raise PlanError(
                f"attention at {site.path!r}: its processor, a {kind.__name__}, cannot be given a subclass ({error})."
                " Write a processor as a plain class with __call__."
            ) from error
    module.__dict__[SITE] = site
    return processor


def displace(module: nn.Module) -> None:
    """Take a module's Site away."""
    module.__dict__.pop(SITE, None)


def make_plain(processor: Any) -> type | None:
    """Give a processor its own class back. Returns the subclass it had, None when it had none."""
    sharded = type(processor)
    if (plain := getattr(sharded, PLAIN, None)) is None:
        return None
    processor.__class__ = plain
    return sharded


def plain_class(kind: type) -> type:
    """The class that `kind` is, or was made of here."""
    plain: type = getattr(kind, PLAIN, kind)
    return plain


@functools.cache
def sharded_class(plain: type) -> type:
    """The subclass of a processor's class that opens the funnels where its attention module has a Site, and is its class in every other way."""
    trusted = hasattr(plain, "_attention_backend") and plain.__module__.startswith(
        "diffusers."
    )  # dispatches every attention it computes

    @functools.wraps(plain.__call__)
    def call(self: Any, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        site = getattr(attn, SITE, None)
        if site is None:
            return plain.__call__(self, attn, *args, **kwargs)
        visit = Visit(site)
        with scope(visit), nullcontext() if trusted else SdpaFunnel(visit):
            result = plain.__call__(self, attn, *args, **kwargs)
        if visit.calls == 0:
            raise PlanError(
                f"attention at {site.path!r}: {plain.__name__} computes attention in a way that cannot be seen from outside (neither diffusers'"
                " dispatch_attention_fn nor torch's scaled_dot_product_attention). Set a processor that diffusers ships for this model."
            )
        return result

    return type(plain.__name__, (plain,), {"__call__": call, "__module__": plain.__module__, PLAIN: plain})
