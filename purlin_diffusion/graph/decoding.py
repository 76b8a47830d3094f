"""The VAE's decode under graphs. It is a method and no forward, so it gets an attribute of its own on the instance, which undo takes away again."""

from __future__ import annotations

import inspect
import threading
import time
from types import MethodType
from typing import Any

import torch
from torch import nn

from purlin_diffusion.config import ParallelConfig
from purlin_diffusion.graph.counts import GraphCounts
from purlin_diffusion.graph.key import Key, key_of
from purlin_diffusion.graph.policy import Graphs, of_compile
from purlin_diffusion.graph.state import state_of
from purlin_diffusion.graph.store import Store, Wish
from purlin_diffusion.graph.take import Take
from purlin_diffusion.placement import device_of

DECODE = "decode"
# Whose decode is a function of its arguments, weights and flags; video VAEs keep frames between calls.
KNOWN = ("AutoencoderKL",)


class Decoding:
    """In the place of `vae.decode` from open() until close(). Tiles, slices and an upcast are attributes and dtypes of the VAE: part of its state."""

    def __init__(self, vae: nn.Module, graphs: Graphs, off: str) -> None:
        self._vae, self._below = vae, MethodType(type(vae).decode, vae)  # type: ignore[attr-defined]
        self._signature = inspect.signature(self._below)
        self._lock = threading.RLock()
        self._store: Store[Take] = Store([] if off else [graphs.pool(device_of(vae))], graphs.limits, off)

    def open(self) -> None:
        if not self._store.off:
            self._vae.__dict__[DECODE] = self

    def close(self) -> None:
        """Give the VAE back as it was."""
        if self._vae.__dict__.get(DECODE) is self:
            del self._vae.__dict__[DECODE]
        with self._lock:
            self._store.forget()

    def counts(self) -> GraphCounts:
        return self._store.counts(next(iter(self._store.pools), None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the class's decode does and returns."""
        with self._lock:
            if self._store.off or torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
                return self._below(*args, **kwargs)
            arguments = dict(self._signature.bind(*args, **kwargs).arguments)
            key = key_of(arguments, *state_of(self._vae))
            due = self._store.look(key)
            why = ""
            if due is Wish.CAPTURE:
                due, why = self._record(key, arguments)
            if due is Wish.REPLAY:
                return self._store.use(key).replay(arguments)
            output = self._below(**arguments)
            if why:
                self._store.failed(key, why)
            else:
                self._store.ran(key)
            return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the VAE decodes by its class's decode, with its own weights."""
        copied = memo.get(id(self._vae))
        return self if copied is None else MethodType(type(copied).decode, copied)

    def _record(self, key: Key, arguments: dict[str, Any]) -> tuple[Wish, str]:
        self._store.measure()
        pool = self._store.pools[0]
        take, began = Take(pool), time.perf_counter()
        try:
            pool.prepare(None)
            take.record(lambda inputs: self._below(**inputs), arguments)
        except Exception as error:
            return Wish.EAGER, self._store.broke(error)
        kept = self._store.add(key, take, 1e3 * (time.perf_counter() - began))
        return (Wish.REPLAY if kept else Wish.EAGER), ""


def decoding_of(pipe: Any, config: ParallelConfig, graphs: Graphs) -> Decoding | None:
    """The decode of a pipeline's VAE, in its place; None where there is no VAE, or it is not asked for."""
    vae = None if isinstance(pipe, nn.Module) else (getattr(pipe, "components", None) or {}).get("vae")
    if not isinstance(vae, nn.Module) or not hasattr(vae, DECODE) or not config.vae or config.graph is False:
        return None
    kind = type(vae).__name__
    unknown = "" if kind in KNOWN else f"a {kind} may keep something from call to call"
    taken = "its decode was replaced already" if DECODE in vae.__dict__ else ""
    decoding = Decoding(vae, graphs, graphs.why_off(device_of(vae), unknown, taken, of_compile(vae)))
    decoding.open()
    return decoding
