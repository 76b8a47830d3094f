"""One recorded call: where its inputs and outputs lie, and how to run it on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from purlin_diffusion.graph.recorder import Pool
from purlin_diffusion.tree import leaves, map_output, map_tensors


class Take:
    """`pool`: on its device all inputs are put, those that come from the CPU too: a copy from there cannot be recorded."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._recorder = pool, pool.recorder()
        self._inputs: list[Tensor] = []
        self._outputs: Any = None

    def record(
        self,
        body: Callable[[dict[str, Any]], Any],
        arguments: Mapping[str, Any],
        *,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """body(arguments), recorded on copies of its tensors. Raises what Recorder.record raises."""
        inputs = map_tensors(dict(arguments), lambda x: alike(x.detach(), self._pool.device))
        with _without_cast_cache():
            self._outputs = self._recorder.record(lambda: body(inputs), ready=ready)
        self._inputs = list(_tensors(inputs))

    def replay(self, arguments: Mapping[str, Any]) -> Any:
        """The recorded call on `arguments`, which have the same key. What it returns is the caller's: no later replay writes there.

        All that allocates comes first: what is enqueued behind a rank that waits for another may not.
        """
        pairs: list[tuple[Tensor, Tensor]] = []

        def fresh(x: Tensor) -> Tensor:
            pairs.append((torch.empty_like(x), x))
            return pairs[-1][0]

        outputs = map_output(self._outputs, fresh)
        with self._pool.turn():
            for mine, theirs in zip(self._inputs, _tensors(arguments), strict=True):
                _spread(mine).copy_(_spread(theirs))
            self._recorder.replay()
            for theirs, mine in pairs:
                theirs.copy_(mine)
        return outputs

    def free(self) -> None:
        self._recorder.free()
        self._inputs, self._outputs = [], None


def alike(x: Tensor, device: torch.device) -> Tensor:
    """A copy of `x` on `device` with its strides: compiled code would be compiled anew for others, which cannot be done while a graph is recorded."""
    spread = _spread(x)
    copy = torch.empty_strided(spread.shape, spread.stride(), dtype=x.dtype, device=device)
    return copy.copy_(spread).expand(x.shape)


def _spread(x: Tensor) -> Tensor:
    """`x` without what it only repeats."""
    for dim, (extent, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and extent > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _tensors(value: Any) -> Iterator[Tensor]:
    return (x for _, x in leaves(value) if isinstance(x, Tensor))


@contextmanager
def _without_cast_cache() -> Iterator[None]:
    """Autocast keeps casts of weights until its block ends: a graph would go on reading them.

    Without autocast the switch stays as it is: compiled code looks at it.
    """
    if not any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        yield
        return
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
