"""On every rank: visit each mode in turn, as often as asked, then once more to look at."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from purlin_diffusion.commands.exits import InputError
from purlin_diffusion.commands.options import Options
from purlin_diffusion.commands.picture import Seconds, call, call_arguments, load
from purlin_diffusion.commands.ranks import here, place, places
from purlin_diffusion.commands.timing import memory
from purlin_diffusion.commands.timing.likeness import Likeness
from purlin_diffusion.commands.timing.modes import Asked, Mode, cannot, modes
from purlin_diffusion.commands.timing.opened import Pipes
from purlin_diffusion.commands.timing.profile import Profile, profiled

SHOWN = 384  # pixels of a picture's longer side on the page


@dataclass(frozen=True)
class Visit:
    """One rank's timed call in one mode; no seconds on a rank that had no part in it, nor where the mode `cannot`.

    `likeness`: on the root, to the one-rank image of the same repeat. `profile` and `picture` (a PNG): on the root, of the last round, which is
    not timed.
    """

    mode: Mode
    seconds: Seconds | None = None
    images: int = 1
    memory_gb: float | None = None
    likeness: Likeness | None = None
    profile: Profile | None = None
    picture: bytes | None = None
    cannot: str = ""


def measure(options: Options, asked: Asked) -> list[Visit]:
    """All visits of this rank, in the order in which they were made; of a mode that cannot run the first that says so."""
    for name in ("purlin_diffusion", "diffusers"):  # the table says which route each row took
        logging.getLogger(name).setLevel(logging.ERROR)
    pipe = load(options, place(options))
    pipe.set_progress_bar_config(disable=True)
    return Rank(options, asked, Pipes(pipe, options)).visits()


@dataclass
class Rank:
    """This process in the run. `reference`: the latest image of one rank, on the root."""

    options: Options
    asked: Asked
    pipes: Pipes
    reference: Any = None
    refused: dict[Mode, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def visits(self) -> list[Visit]:
        every = modes(self.options)
        self.refused = {mode: why for mode in every if (why := cannot(mode, self.options, self.asked))}
        visits = [Visit(mode, cannot=why) for mode, why in self.refused.items()]
        for repeat in range(1, self.asked.repeats + 1):
            self.reference = None
            for mode in [mode for mode in every if mode not in self.refused]:
                visits.append(self.visit(mode, self.timed))
                self.say(f"repeat {repeat} of {self.asked.repeats}", visits[-1])
        for mode in [mode for mode in every if mode not in self.refused]:
            visits.append(self.visit(mode, self.shown))
            self.say("one more, watched", visits[-1])
        return visits

    def visit(self, mode: Mode, look: Callable[[Mode, Any, Any], Visit]) -> Visit:
        """A rank that has no part waits. Where one rank cannot, all leave the mode alone from then on."""
        visit = Visit(mode)
        if here(self.options) == 0 or mode.kind not in {"alone", "balanced"}:
            visit = self.tried(mode, look)
        if why := agreed(self.options, visit.cannot):
            self.refused[mode] = why
            return Visit(mode, cannot=why)
        return visit

    def tried(self, mode: Mode, look: Callable[[Mode, Any, Any], Visit]) -> Visit:
        from purlin_diffusion.workers import intra_op_threads

        try:
            with intra_op_threads(mode.threads), self.pipes.opened(mode) as (pipe, handle):
                return look(mode, pipe, handle)
        except InputError:
            raise
        except Exception as error:
            if not excused(mode, error):
                raise
            return Visit(mode, cannot=told(error))

    def timed(self, mode: Mode, pipe: Any, _handle: Any) -> Visit:
        devices = self.devices(mode)
        memory.start(devices)
        for _ in range(self.asked.warmup):
            self.draw(mode, pipe)
        self.meet(mode)
        image, seconds = self.draw(mode, pipe)
        visit = Visit(mode, seconds, memory_gb=memory.peak_gb(devices))
        return replace(visit, images=mode.ranks if mode.kind == "split" else 1, likeness=self.liken(mode, image))

    def shown(self, mode: Mode, pipe: Any, handle: Any) -> Visit:
        gpu = place(self.options) != "cpu"
        seen = gpu or mode.kind == "ours"
        if here(self.options) != 0:
            self.draw(mode, pipe)
            return Visit(mode)
        among = mode.ranks > 1 and mode.kind in {"context", "ours"} and seen
        (image, _), profile = profiled(lambda: self.draw(mode, pipe), pipe, handle, gpu=gpu, exchanges=among)
        return Visit(mode, profile=profile, picture=png(image[0]))

    def draw(self, mode: Mode, pipe: Any) -> tuple[Any, Seconds]:
        """b x h x w x 3 in 0..1, and its seconds. Of split prompts each rank draws its own: the root's is that of the other modes."""
        return call(pipe, call_arguments(self.options), seed=self.options.seed + self.number(mode), output="np")

    def devices(self, mode: Mode) -> list[str]:
        """Those at whose memory this process looks."""
        many = mode.kind == "balanced" or (mode.kind == "ours" and self.options.mode == "threads")
        return places(self.options) if many else [place(self.options)]

    def number(self, mode: Mode) -> int:
        if mode.kind != "split":
            return 0
        from accelerate import PartialState  # type: ignore[import-untyped]

        state = PartialState(cpu=place(self.options) == "cpu")
        with state.split_between_processes(list(range(mode.ranks))) as mine:
            return int(mine[0])

    def meet(self, mode: Mode) -> None:
        if mode.kind not in {"alone", "balanced"}:
            agreed(self.options, "")

    def liken(self, mode: Mode, image: Any) -> Likeness | None:
        """The first image of one rank is the reference of its repeat."""
        if here(self.options) != 0:
            return None
        if self.reference is None:
            self.reference = image if (mode.kind, mode.how) == ("alone", "eager") else None
            return None
        return Likeness.of(image, self.reference)

    def say(self, when: str, visit: Visit) -> None:
        """Progress, on the root's error stream."""
        if here(self.options) == 0:
            took = f"{visit.seconds.whole * 1e3:.0f} ms" if visit.seconds else visit.cannot or "done"
            so_far = time.monotonic() - self.began
            print(f"latency: {so_far:5.0f} s  {when}: {visit.mode.title}: {took}", file=sys.stderr, flush=True)


def excused(mode: Mode, error: Exception) -> bool:
    """Whether an exception is a row rather than a defect of ours: what we refuse, want of memory, and all that others raise."""
    import torch

    from purlin_core.errors import PurlinError

    return mode.kind != "ours" or isinstance(error, (PurlinError, NotImplementedError, torch.OutOfMemoryError))


def told(error: Exception) -> str:
    from purlin_core.errors import PurlinError

    said = " ".join(str(error).split())
    return said if isinstance(error, PurlinError) else f"{type(error).__name__}: {said}"[:400]


def agreed(options: Options, why: str) -> str:
    """Wait until every process is here. Returns the first one's reason, if there is any."""
    import torch.distributed as dist

    if options.mode not in {"processes", "launched"}:
        return why
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, why)
    return next(filter(None, reasons), "")


def png(image: Any) -> bytes:
    """An h x w x 3 array in 0..1, made smaller where it is larger than a page shows."""
    from PIL import Image

    picture = Image.fromarray((image * 255).round().astype("uint8").squeeze())
    picture.thumbnail((SHOWN, SHOWN))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
