"""One rank's visits: each mode in turn, as often as asked, then once more to look at."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from purlin_diffusion.commands import streams
from purlin_diffusion.commands.exits import InputError
from purlin_diffusion.commands.options import Options
from purlin_diffusion.commands.picture import Seconds, call, call_arguments
from purlin_diffusion.commands.ranks import here, place, places
from purlin_diffusion.commands.timing import memory, warmth
from purlin_diffusion.commands.timing.likeness import Likeness
from purlin_diffusion.commands.timing.modes import Asked, Mode, cannot, modes
from purlin_diffusion.commands.timing.opened import Pipes, Ready
from purlin_diffusion.commands.timing.profile import profiled
from purlin_diffusion.commands.timing.steps import Outputs, seen_outputs
from purlin_diffusion.commands.timing.truth import Error, Truth
from purlin_diffusion.commands.timing.visit import DEFECT, Graphs, Visit, Visits, png, together
from purlin_diffusion.commands.timing.watch import watched_host

GRAPH_WARMUP = 2  # calls: the first runs, the second records, of the denoiser's steps and of the VAE's decode
WATCHED_STEPS = 3  # of a call under a profiler: one lies amid it
ON_ROOT = {"alone", "balanced"}  # kinds of modes that one process runs


@dataclass
class Rank:
    """This process in the visits of one size. `seen`: on the root, what all processes saw. `reference`: the latest image of one rank, on the root."""

    options: Options
    asked: Asked
    pipes: Pipes
    truth: Truth | None = None
    reference: Any = None
    refused: dict[Mode, str] = field(default_factory=dict)
    seen: Visits = field(default_factory=list)
    owed: bool = False  # to the others, who will wait for this rank before they time
    began: float = field(default_factory=time.monotonic)

    def visits(self, keep: Callable[[], None]) -> None:
        """All of them; keep() after each."""
        every = modes(self.options, self.asked)
        self.refused = {mode: why for mode in every if (why := cannot(mode, self.options, self.asked))}
        self.seen += [
            [Visit(mode, cannot=why) for mode, why in self.refused.items()] for _ in together(self.options, 0)
        ]
        rounds = [(f"repeat {n} of {self.asked.repeats}", self.timed) for n in range(1, self.asked.repeats + 1)]
        try:
            for when, look in [*rounds, *[("one more, watched", self.shown)] * self.asked.watch]:
                self.reference = None
                for mode in [mode for mode in every if mode not in self.refused]:
                    self.visit(mode, look, when)
                    if here(self.options) == 0:
                        keep()
        finally:
            self.pipes.close()
            memory.give_back()

    def visit(self, mode: Mode, look: Callable[[Mode, Ready], Visit], when: str) -> None:
        """A rank that has no part waits. Where one rank cannot, all leave the mode alone from then on."""
        mine = Visit(mode)
        if here(self.options) == 0 or mode.kind not in ON_ROOT:
            mine = self.tried(mode, look)
        every = together(self.options, mine)
        if why := weightiest(each.cannot for each in every):
            self.refused[mode] = why
            self.pipes.drop(mode)
            memory.give_back()
            timed = any(each.seconds for each in self.seen[0] if each.mode == mode)
            every = [Visit(mode, note=why) if timed and look == self.shown else Visit(mode, cannot=why) for _ in every]
        for of_rank, each in zip(self.seen, every, strict=True):
            of_rank.append(each)
        took = f"{every[0].seconds.whole * 1e3:.0f} ms" if every[0].seconds else why or "done"
        say(self.options, self.began, f"{when}: {mode.title}: {took}")

    def tried(self, mode: Mode, look: Callable[[Mode, Ready], Visit]) -> Visit:
        """look() at a mode, or why it cannot be. Ranks agree that all are ready first: one that is not would leave the others waiting for it."""
        from purlin_diffusion.workers import intra_op_threads

        ready = self.owed = False
        try:
            others = memory.start(self.devices(mode), self.pipes.weights(mode))
            with intra_op_threads(mode.threads), self.pipes.opened(mode) as opened:
                ready = True
                if why := self.met(mode, ""):
                    return Visit(mode, cannot=why)
                visit = look(mode, opened)
                if visit.seconds and not self.met_before(mode):
                    visit = replace(visit, memory_gb=memory.peak_gb(self.devices(mode), others))
                return visit
        except Exception as error:
            if isinstance(error, InputError) and mode.kind == "alone":  # what is wrong for one rank is wrong for all
                raise
            why = told(error)
            if not excused(mode, error):
                traceback.print_exc()
                why = f"{DEFECT}: {why}"
        return Visit(mode, cannot=self.met(mode, why) if self.owed or not ready else why)

    def timed(self, mode: Mode, ready: Ready) -> Visit:
        self.owed = True
        for _ in range(max(self.asked.warmup, GRAPH_WARMUP * mode.graph)):
            self.draw(mode, ready)
        self.owed = False
        if why := self.met(mode, ""):
            return Visit(mode, cannot=why)
        with seen_outputs(ready.pipe) as outputs:
            images, seconds = self.draw(mode, ready)
            warm = warmth.read(self.devices(mode))  # at once: it cools
        found = graphs(ready)
        if mode.graph and (found is None or found.replays == 0):
            return Visit(
                mode, cannot=f"no graph was replayed: {found.off or 'none was recorded' if found else 'none is made'}"
            )
        many = mode.ranks if mode.kind == "split" else 1
        image = array(images)
        likeness, error = self.liken(mode, image), self.error(outputs)
        return Visit(mode, seconds, many, warmth=warm, likeness=likeness, error=error, graphs=found)

    def shown(self, mode: Mode, ready: Ready) -> Visit:
        gpu = place(self.options) != "cpu"
        root = here(self.options) == 0
        if mode.graph:
            self.draw(mode, ready, short=True)
        if not root:
            for short in (False, True):
                self.draw(mode, ready, short=short)
            return Visit(mode)
        (images, _), host = watched_host(lambda: self.draw(mode, ready), ready.pipe, gpu=gpu)
        among = mode.ranks > 1 and mode.kind in {"context", "ours"} and (gpu or mode.kind == "ours")
        handle = ready.handle if mode.kind == "ours" else None
        _, profile = profiled(lambda: self.draw(mode, ready, short=True), ready.pipe, handle, gpu=gpu, exchanges=among)
        return Visit(mode, host=host, profile=profile, picture=png(array(images)[0]))

    def draw(self, mode: Mode, ready: Ready, *, short: bool = False) -> tuple[Any, Seconds]:
        """b x 3 x h x w in 0..1, and its seconds. Of split prompts each rank draws its own: the root's is that of the other modes.
        `short`: few steps, and no picture."""
        arguments = call_arguments(self.options)
        steps = arguments.get("num_inference_steps")
        if short and steps:
            arguments["num_inference_steps"] = min(steps, WATCHED_STEPS)
        seed = self.options.seed + self.number(mode)
        return call(ready.pipe, arguments, seed=seed, output="latent" if short else "pt")

    def devices(self, mode: Mode) -> list[str]:
        """Those at whose memory and warmth this process looks."""
        many = mode.kind == "balanced" or (mode.kind == "ours" and self.options.mode == "threads")
        return places(self.options) if many else [place(self.options)]

    def number(self, mode: Mode) -> int:
        if mode.kind != "split":
            return 0
        from accelerate import PartialState  # type: ignore[import-untyped]

        state = PartialState(cpu=place(self.options) == "cpu")
        with state.split_between_processes(list(range(mode.ranks))) as mine:
            return int(mine[0])

    def met(self, mode: Mode, why: str) -> str:
        """Wait for the ranks that have a part. Returns the weightiest of their reasons, if there is any."""
        return why if mode.kind in ON_ROOT else weightiest(together(self.options, why))

    def met_before(self, mode: Mode) -> bool:
        """A mode's memory is that of its first visit: later ones find there what the first has left."""
        return any(visit.mode == mode for visit in self.seen[0])

    def liken(self, mode: Mode, image: Any) -> Likeness | None:
        """The first image of one rank is the reference of its repeat."""
        if here(self.options) != 0:
            return None
        if self.reference is None:
            self.reference = image if (mode.kind, mode.how) == ("alone", "eager") else None
            return None
        return Likeness.of(image, self.reference)

    def error(self, outputs: Outputs) -> Error | None:
        return Error.of(outputs, self.truth) if self.truth is not None else None


def weightiest(reasons: Iterable[str]) -> str:
    """Of the ranks' reasons: where one has met a defect, the others say that it left."""
    said = [why for why in reasons if why]
    return next((why for why in said if why.startswith(DEFECT)), said[0] if said else "")


def array(images: Any) -> Any:
    """b x h x w x 3 of a tensor b x 3 x h x w, as numpy's."""
    return images.detach().float().cpu().permute(0, 2, 3, 1).numpy()


def graphs(ready: Ready) -> Graphs | None:
    if ready.graphed is not None:
        return Graphs(ready.graphed.captures, ready.graphed.replays)
    if ready.handle is None:
        return None
    counts = ready.handle.counters[0].graphs
    return Graphs(counts.captures, counts.replays, counts.off)


def say(options: Options, began: float, text: str) -> None:
    """Progress, on the root's error stream."""
    if here(options) == 0:
        streams.say(f"latency: {time.monotonic() - began:5.0f} s  {text}", sys.stderr)


def excused(mode: Mode, error: Exception) -> bool:
    """Whether an exception is a row rather than a defect of ours: what we refuse, what torch and CUDA raise, and all of others."""
    from purlin_core.errors import PurlinError

    ours = mode.parallelized and not mode.compile  # what compilers raise is theirs
    return not ours or isinstance(error, (PurlinError, RuntimeError))


def told(error: Exception) -> str:
    from purlin_core.errors import PurlinError

    said = " ".join(str(error).split())
    return said if isinstance(error, PurlinError) else f"{type(error).__name__}: {said}"[:400]
