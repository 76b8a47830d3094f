"""What is timed: who runs the ranks, and how each runs its denoiser. What is known not to run here says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from purlin_diffusion.commands.machine import cores
from purlin_diffusion.commands.options import APART, Options, gpus
from purlin_diffusion.commands.ranks import places

Kind = Literal["alone", "balanced", "split", "context", "ours"]
HOWS = ("eager", "graph", "compile", "compile+graph")
WHO = ("alone", "balanced", "split", "context", "torch", "ours")  # words for modes() below, in its order


@dataclass(frozen=True)
class Asked:
    """How often, who, and how denoisers shall run. Sent to every rank. `truth`: compare with float32; None: on GPUs, where it has room.

    `attentions`: of ours. `commit`: for the record, where git cannot say. `watch`: look at each mode once more, after the repeats.
    `by_size`: sides were named by --size.
    """

    repeats: int
    warmup: int
    hows: tuple[str, ...]
    who: tuple[str, ...] = WHO
    truth: bool | None = None
    attentions: tuple[str, ...] = ("auto",)
    commit: str = ""
    watch: bool = True
    by_size: bool = False


@dataclass(frozen=True)
class Mode:
    """One row of figures. `backend`: who carries exchanges, or diffusers' word for how. `threads`: of one rank on a CPU. `attention`: of ours."""

    name: str
    kind: Kind
    backend: str
    how: str
    ranks: int = 1
    threads: int | None = None
    attention: str = "auto"

    @property
    def who(self) -> str:
        return "torch" if (self.kind, self.backend) == ("ours", "torch") else self.kind

    @property
    def parallelized(self) -> bool:
        """Whether parallelize() has a hand in it: graphs of one rank are its, too."""
        return self.kind == "ours" or (self.kind in {"alone", "split"} and self.graph)

    @property
    def graph(self) -> bool:
        return self.how.endswith("graph")

    @property
    def compile(self) -> bool:
        return self.how.startswith("compile")

    @property
    def title(self) -> str:
        return f"{self.name}, {self.how}"


def modes(options: Options, asked: Asked) -> list[Mode]:
    """All there are, in the order of the table, whether they can run or not."""
    return [mode for how in HOWS for mode in (*alone(options, how), *rivals(options, how), *ours(options, how, asked))]


def alone(options: Options, how: str) -> list[Mode]:
    """On a CPU one rank is timed with as many threads as one of several has, and with all cores. The better one is the rival."""
    if places(options)[0] != "cpu":
        return [Mode("1 rank", "alone", "none", how)]
    counts = sorted({max(1, cores() // options.ranks), cores()})
    return [
        Mode(f"1 rank ({count} thread{'s' * (count > 1)})", "alone", "none", how, threads=count) for count in counts
    ]


def rivals(options: Options, how: str) -> list[Mode]:
    ranks = options.ranks
    return [
        Mode("accelerate device_map", "balanced", "accelerate", how, ranks),
        Mode("accelerate split prompts", "split", "accelerate", how, ranks),
        Mode("diffusers ulysses", "context", "ulysses", how, ranks),
        Mode("diffusers ring (cuDNN)", "context", "ring", how, ranks),
    ]


def ours(options: Options, how: str, asked: Asked) -> list[Mode]:
    many = len(asked.attentions) > 1
    return [
        Mode(f"{name} {attention}" if many else name, "ours", backend, how, options.ranks, attention=attention)
        for name, backend in (("ours over torch", "torch"), ("ours", "purlin"))
        for attention in asked.attentions
    ]


def cannot(mode: Mode, options: Options, asked: Asked) -> str:
    """Why a mode cannot run, as far as that is known before it is tried; empty where it can."""
    return who_cannot(mode, options) or how_cannot(mode, options) or unasked(mode, asked)


def unasked(mode: Mode, asked: Asked) -> str:
    if mode.how not in asked.hows:
        return f"not asked for: --how {mode.how}"
    return "" if mode.who in asked.who else f"not asked for: --modes {mode.who}"


def who_cannot(mode: Mode, options: Options) -> str:
    on_cpu = places(options)[0] == "cpu"
    if mode.kind == "alone":
        return ""
    if options.ranks == 1:
        one = "one rank exchanges nothing: what it can gain is graphs, see 1 rank"
        return one if mode.kind == "ours" else "needs 2 ranks or more: --ranks 2"
    if mode.kind == "balanced" and gpus() < 2:
        return f"a device map spreads a pipeline over GPUs; torch sees {gpus()}"
    if mode.kind == "split" and options.mode not in APART:
        return "needs ranks that are processes, here they are threads"
    if mode.kind == "context" and on_cpu:
        return "diffusers' context parallel does not start without a GPU a rank: it divides by their number"
    if mode.kind == "context" and options.mode not in APART:
        return "needs ranks that are processes with a GPU each, here they are threads"
    return ""


def how_cannot(mode: Mode, options: Options) -> str:
    if not mode.graph:
        return ""
    if places(options)[0] == "cpu":
        return "a CUDA graph needs a GPU"
    if mode.kind == "balanced":
        return "accelerate's hooks move data between GPUs as Python runs: a CUDA graph would leave them out"
    if mode.who == "torch" and options.mode not in APART:
        return "torch.distributed between threads of one process is not recorded"
    return ""
