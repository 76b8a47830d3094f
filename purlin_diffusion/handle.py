"""What parallelize returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from purlin_diffusion.config import ParallelConfig
from purlin_diffusion.counters import Counters

if TYPE_CHECKING:
    from purlin_diffusion.ahead import Loop
    from purlin_diffusion.graph.decoding import Decoding
    from purlin_diffusion.session import Session


class Handle:
    """A parallel model: who this process is in it, what it did, and the way back.

    The model keeps its ranks alive by itself; a handle need not be kept.
    """

    def __init__(self, sessions: Sequence[Session], config: ParallelConfig, at_undo: Callable[[], None]) -> None:
        self._sessions, self._config, self._at_undo = tuple(sessions), config, at_undo
        self._undone = False
        self.decoding: Decoding | None = None  # of the VAE, where that is ours
        self.loop: Loop | None = None  # of the pipeline's steps, where the host may run ahead

    @property
    def sessions(self) -> tuple[Session, ...]:
        """What holds each part that was parallelized; for those who watch its exchanges."""
        return self._sessions

    @property
    def rank(self) -> int:
        """This process's rank; 0 where the ranks are threads."""
        return self._sessions[0].rank

    @property
    def ranks(self) -> int:
        return self._sessions[0].ranks

    @property
    def is_root(self) -> bool:
        """Whether this process saves the image and shows the progress bar."""
        return self.rank == 0

    @property
    def route(self) -> str:
        """What carries the exchanges, and why."""
        return str(self._sessions[0].route)

    @property
    def counters(self) -> tuple[Counters, ...]:
        """What each rank of this process did, denoiser by denoiser."""
        return tuple(counters for session in self._sessions for counters in session.counters())

    @property
    def graphs_off(self) -> str:
        """Why the denoiser has no CUDA graphs; empty where it may have. What became of each call `counters` says."""
        return self._sessions[0].graphs_off

    @property
    def stats(self) -> tuple[Any, ...]:
        """What each rank of this process has exchanged so far, denoiser by denoiser: calls, sent_bytes, received_bytes. Replays are not seen."""
        return tuple(carrier.stats() for session in self._sessions for carrier in session.carriers)

    def explain(self) -> str:
        """Route, plan, layouts, tokens a rank, exchanges and bytes a step, as text; after undo(), that it is undone."""
        from purlin_diffusion.report import explain, undone

        if self._undone:
            return "\n".join(map(undone, self._sessions))
        return "\n\n".join(explain(session, self._config, self.decoding) for session in self._sessions)

    def on_all(self, fn: Callable[[nn.Module], Any]) -> list[Any]:
        """fn(model) on the denoiser of this process, so that all ranks have its effect; under a launcher every rank calls it. Returns what fn did.

        What LoRA, IP-Adapters and attribute changes do is followed without this; it is for changes that cannot be seen from outside.
        """
        return [session.on_all(fn) for session in self._sessions]

    def check(self) -> None:
        """Wait for all calls that were launched, and raise what their exchanges met. A pipeline does so before its picture leaves; for those who look
        at latents in a callback, where on GPUs the latest step may not have ended."""
        for session in self._sessions:
            session.check()

    def undo(self) -> None:
        """Give the model back as it was, bit for bit, and end the ranks of this process. Does nothing the second time.

        Raises, when that is done, what check() raises.
        """
        if not self._undone:
            self._undone = True
            with ExitStack() as last_first:
                last_first.callback(self._at_undo)
                for session in reversed(self._sessions):
                    last_first.callback(session.close)
                for door in (self.decoding, self.loop):
                    if door is not None:
                        last_first.callback(door.close)
                self.check()

    def __repr__(self) -> str:
        state = "undone" if self._undone else f"rank {self.rank} of {self.ranks}, {self.route}"
        return f"<purlin_diffusion.Handle: {state}>"
