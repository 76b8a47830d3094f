"""A pipeline made ready for a mode, and given back. What cannot be undone (compile, diffusers' context parallel) is done to a copy that shares its
weights, once a run."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from purlin_diffusion.commands.options import Options, parallel_config
from purlin_diffusion.commands.ranks import places
from purlin_diffusion.commands.timing.modes import Mode


@dataclass(frozen=True)
class Pipes:
    """The pipeline of this process, and the copies that modes have left changed."""

    plain: Any
    options: Options
    kept: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def opened(self, mode: Mode) -> Iterator[tuple[Any, Any]]:
        """The pipeline, and the handle where it is ours. Collective for modes of several ranks. Raises what making it ready raises."""
        if mode.kind == "ours":
            with ours(self.plain, self.options, mode) as handle:
                yield self.plain, handle
        elif mode.kind in {"alone", "split"} and not mode.compile:
            yield self.plain, None
        else:
            if mode.title not in self.kept:
                self.kept[mode.title] = self._made(mode)
            yield self.kept[mode.title], None

    def _made(self, mode: Mode) -> Any:
        pipe = balanced(self.plain) if mode.kind == "balanced" else sharing_weights(self.plain)
        if mode.kind == "context":
            context_parallel(pipe, mode)
        if mode.compile:
            compile_denoisers(pipe, graph=mode.graph)
        return pipe


@contextmanager
def ours(pipe: Any, options: Options, mode: Mode) -> Iterator[Any]:
    from purlin_diffusion import parallelize

    config = replace(parallel_config(replace(options, backend=mode.backend)), graph=mode.graph)
    threads = options.mode in {"threads", "single"}
    handle = parallelize(pipe, config, devices=places(options) if threads else None)
    try:
        yield handle
    finally:
        handle.undo()


def sharing_weights(pipe: Any) -> Any:
    """A pipeline with denoisers of its own, which hold the same tensors."""
    other = copy.copy(pipe)
    for name, model in named_denoisers(pipe):
        memo = {id(x): x for x in (*model.parameters(), *model.buffers())}
        setattr(other, name, copy.deepcopy(model, memo))
    return other


def named_denoisers(pipe: Any) -> list[tuple[str, Any]]:
    from purlin_diffusion.placement import DENOISERS

    return [(name, pipe.components[name]) for name in DENOISERS if pipe.components.get(name) is not None]


def balanced(pipe: Any) -> Any:
    """accelerate's default for a pipeline: its parts on several GPUs, one after the other at work."""
    with tempfile.TemporaryDirectory(prefix="purlin-latency-") as folder:
        pipe.save_pretrained(folder)
        spread = type(pipe).from_pretrained(Path(folder), dtype=pipe.dtype, device_map="balanced")
    spread.set_progress_bar_config(disable=True)
    return spread


def context_parallel(pipe: Any, mode: Mode) -> None:
    from diffusers import ContextParallelConfig

    for _, model in named_denoisers(pipe):
        model.enable_parallelism(config=ContextParallelConfig(**{f"{mode.backend}_degree": mode.ranks}))


def compile_denoisers(pipe: Any, *, graph: bool) -> None:
    """As diffusers' guide does: the blocks that repeat; all of it where graphs are wanted, or where diffusers names no blocks."""
    for _, model in named_denoisers(pipe):
        if graph:
            model.compile(mode="reduce-overhead")
        else:
            compile_blocks(model.compile_repeated_blocks, otherwise=model.compile)


def compile_blocks(blocks: Callable[[], None], *, otherwise: Callable[[], None]) -> None:
    try:
        blocks()
    except ValueError:  # diffusers names none for this class
        otherwise()
