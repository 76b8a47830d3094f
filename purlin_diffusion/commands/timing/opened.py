"""A pipeline made ready for a mode, and given back.

What cannot be undone (compile, diffusers' context parallel) is done to a copy that shares its weights, once a run. What is compiled and ours stays
parallel until the end of it, too: its replicas would be compiled anew. Graphs are made anew at each visit, by the calls that warm up.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from purlin_diffusion.commands.options import APART, Options, parallel_config
from purlin_diffusion.commands.ranks import places
from purlin_diffusion.commands.timing.modes import Mode

SHM = Path("/dev/shm")  # where a pipeline is written faster than on a disk, if it fits
RING_ATTENTION = (
    "_native_cudnn"  # of those in torch the one that gives what a ring adds up by; diffusers' default does not
)
MOST_GRAPHS = 64  # of the code of one block, in all modes and sizes


@dataclass(frozen=True)
class Ready:
    """`handle`: of parallelize, or of a graph made by hand; None where there is neither."""

    pipe: Any
    handle: Any = None
    graphed: Any = None


@dataclass
class Pipes:
    """The pipeline of this process, and what modes have left changed or open."""

    plain: Any
    options: Options
    kept: dict[str, Ready] = field(default_factory=dict)
    closing: dict[str, ExitStack] = field(default_factory=dict)

    @contextmanager
    def opened(self, mode: Mode) -> Iterator[Ready]:
        """Collective for modes of several ranks. Raises what making it ready raises."""
        if mode.parallelized and not mode.compile:
            with parallelized(self.plain, self.options, mode) as handle:
                yield Ready(self.plain, handle)
        elif mode.kind in {"alone", "split"} and not mode.compile:
            yield Ready(self.plain)
        else:
            ready = self.kept.get(mode.title) or self._made(mode)
            if mode.graph and mode.kind == "context":
                with by_hand(ready.pipe) as graphed:
                    yield replace(ready, graphed=graphed)
            else:
                yield ready

    def weights(self, mode: Mode) -> list[Any]:
        """The modules whose weights a mode shares with the pipeline."""
        import torch

        parts = [part for part in self.plain.components.values() if isinstance(part, torch.nn.Module)]
        return [] if mode.kind == "balanced" else parts

    def drop(self, mode: Mode) -> None:
        """Let go of what a mode has left."""
        self.kept.pop(mode.title, None)
        with suppress(Exception):  # it may be what failed
            self.closing.pop(mode.title, ExitStack()).close()

    def close(self) -> None:
        for title in list(self.closing):
            with suppress(Exception):
                self.closing.pop(title).close()
        self.kept.clear()

    def _made(self, mode: Mode) -> Ready:
        with ExitStack() as stack:
            pipe = balanced(self.plain) if mode.kind == "balanced" else sharing_weights(self.plain)
            handle = None
            if mode.kind == "context":
                context_parallel(pipe, mode)
            if mode.parallelized:
                handle = stack.enter_context(parallelized(pipe, self.options, mode))
            if mode.compile:  # when it is parallel: then its plan names the blocks where diffusers names none
                compile_denoisers(pipe, fullgraph=mode.kind not in {"context", "balanced"})
            self.kept[mode.title] = Ready(pipe, handle)
            self.closing[mode.title] = stack.pop_all()
        return self.kept[mode.title]


@contextmanager
def parallelized(pipe: Any, options: Options, mode: Mode) -> Iterator[Any]:
    """`pipe` on all ranks; on this one alone where the mode is of one rank, which gains graphs."""
    from purlin_diffusion import parallelize
    from purlin_diffusion.carrier import Alone

    backend = mode.backend if mode.kind == "ours" else "auto"
    config = replace(parallel_config(replace(options, backend=backend, attention=mode.attention)), graph=mode.graph)
    apart = options.mode in APART
    if mode.kind == "ours":
        handle = parallelize(pipe, config, devices=None if apart else places(options))
    else:
        handle = parallelize(pipe, config, communicator=Alone() if apart else None)
    try:
        yield handle
    finally:
        handle.undo()


@contextmanager
def by_hand(pipe: Any) -> Iterator[Any]:
    """A CUDA graph of the one denoiser of a rival."""
    from purlin_diffusion.commands.timing.handmade import graphed

    ((_, model),) = named_denoisers(pipe)
    with graphed(model) as made:
        yield made


def sharing_weights(pipe: Any) -> Any:
    """A pipeline with denoisers and a VAE of its own, which hold the same tensors."""
    other = copy.copy(pipe)
    vae = [("vae", pipe.vae)] if getattr(pipe, "vae", None) is not None else []
    for name, model in [*named_denoisers(pipe), *vae]:
        memo = {id(x): x for x in (*model.parameters(), *model.buffers())}
        setattr(other, name, copy.deepcopy(model, memo))
    return other


def named_denoisers(pipe: Any) -> list[tuple[str, Any]]:
    from purlin_diffusion.placement import DENOISERS

    return [(name, pipe.components[name]) for name in DENOISERS if pipe.components.get(name) is not None]


def balanced(pipe: Any) -> Any:
    """accelerate's default for a pipeline: its parts on several GPUs, one after the other at work."""
    with tempfile.TemporaryDirectory(prefix="purlin-latency-", dir=roomy(pipe)) as folder:
        pipe.save_pretrained(folder)
        spread = type(pipe).from_pretrained(Path(folder), dtype=pipe.dtype, device_map="balanced")
    spread.set_progress_bar_config(disable=True)
    return spread


def roomy(pipe: Any) -> Path | None:
    """Where all weights of `pipe` have room twice over: shared memory; None for the usual place of temporary files."""
    import torch

    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    size = sum(x.numel() * x.element_size() for part in parts for x in part.parameters())
    return SHM if SHM.is_dir() and shutil.disk_usage(SHM).free > 2 * size else None


def context_parallel(pipe: Any, mode: Mode) -> None:
    from diffusers import ContextParallelConfig

    for _, model in named_denoisers(pipe):
        if mode.backend == "ring":
            model.set_attention_backend(RING_ATTENTION)
        model.enable_parallelism(config=ContextParallelConfig(**{f"{mode.backend}_degree": mode.ranks}))


def compile_denoisers(pipe: Any, *, fullgraph: bool) -> None:
    """As diffusers' guide does: the blocks that repeat; those of our plan where diffusers names none; else all of it.

    For the sizes there are: torch remembers those of other modes that run the same code, and what comes after them it would compile for any size, and
    that takes the host longer. `fullgraph`: a break is an error. diffusers' context parallel and accelerate's hooks are given leave to break.
    """
    import torch

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    for _, model in named_denoisers(pipe):
        compile_blocks(
            partial(model.compile_repeated_blocks, fullgraph=fullgraph, dynamic=False),
            otherwise=partial(compile_planned, model, fullgraph=fullgraph),
        )


def compile_blocks(blocks: Callable[[], None], *, otherwise: Callable[[], None]) -> None:
    try:
        blocks()
    except ValueError:  # diffusers names none for this class
        otherwise()


def compile_planned(model: Any, *, fullgraph: bool) -> None:
    from purlin_diffusion.errors import UnsupportedModelError
    from purlin_diffusion.registry import plan_of

    try:
        names = plan_of(model).blocks
    except UnsupportedModelError:
        names = ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    for module in blocks or [model]:
        module.compile(fullgraph=fullgraph, dynamic=False)
