"""How one rank is tied to its peers: the arena they write, the boards all read, the endpoint that runs calls, and how it all ends."""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from purlin_core import _cpu
from purlin_core.board import BOARD_BYTES, Board, State
from purlin_core.errors import PurlinError, SetupError
from purlin_core.failure import Fault, Scene, error_of
from purlin_core.memory import Heap, Segment
from purlin_core.prepare import Prepared, Site
from purlin_core.rendezvous import LocalRendezvous, Rendezvous
from purlin_core.settings import VERSION, Settings
from purlin_core.tune import Scratch
from purlin_core.watch import Watch

PARTING_TIMEOUT = 5.0  # seconds that close() waits for the peers


class Connection:
    """Made by all ranks together; raises SetupError on all of them when they do not fit. Dead after the first fault, for good."""

    def __init__(
        self,
        meeting: Rendezvous,
        scratch: Scratch,
        settings: Settings,
        *,
        heap_bytes: int,
        timeout: float,
        setup_timeout: float,
    ) -> None:
        self.rank, self.ranks = meeting.rank, meeting.ranks
        self.timeout = timeout
        self._meeting, self._setup_timeout = meeting, setup_timeout
        self._pid = os.getpid()
        geometry = _geometry(self.ranks, scratch, heap_bytes)
        local = isinstance(meeting, LocalRendezvous)
        make = Segment.private if local else Segment.shared
        own = (make(geometry.arena_bytes), make(BOARD_BYTES))
        terms = {
            "protocol": VERSION,
            "ranks": self.ranks,
            "heap_bytes": heap_bytes,
            **asdict(scratch),
            **asdict(settings),
        }
        card: dict[str, Any] = {
            "machine": platform.node(),
            "pid": self._pid,
            "files": [s.fd for s in own],
            "terms": terms,
        }
        everyone = meeting.gather(card | ({"segments": own} if local else {}), timeout=setup_timeout)
        check_terms([there["terms"] for there in everyone])
        mapped = [own if r == self.rank else _map(there, own) for r, there in enumerate(everyone)]
        self.boards = [Board(board) for _, board in mapped]
        self._mapped = mapped  # the endpoint knows addresses only
        self.heap = Heap(own[0], geometry.heap_at, heap_bytes)
        self.site = Site(self.rank, self.ranks, scratch, geometry)
        self.end = _cpu.Endpoint(self.rank, geometry, arenas=[arena.address for arena, _ in mapped], timeout_s=timeout)
        meeting.gather(None, timeout=setup_timeout)  # all have mapped and set their words: from here on peers may write
        for segment in own:
            segment.forget()
        self._watch = (
            None if local else Watch({r: t["pid"] for r, t in enumerate(everyone) if r != self.rank}, self._on_death)
        )
        self._exit = weakref.finalize(self, _leave, self.boards[self.rank], self._watch, self._pid)

    @property
    def healthy(self) -> bool:
        return self.end.fault[0] == int(Fault.NONE)

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.gather(value, timeout=self._setup_timeout)

    def error(self, last: Prepared | None) -> PurlinError | None:
        """What killed this connection, in words, as seen by a rank whose latest call is `last`."""
        text, signature = (last.text, last.signature) if last else ("", 0)
        return error_of(Scene(self.rank, self.end, self.boards, self.timeout, text, signature))

    def tell_why(self, reason: str) -> None:
        """Kill the connection; every rank's pending or next call raises PeerError with this reason."""
        self.boards[self.rank].reason = reason
        self.end.abort(int(Fault.LEFT), self.rank)

    def part(self) -> None:
        """Leave, together with the peers when they come in time."""
        if os.getpid() != self._pid:  # a forked child owns none of this
            return
        if self.healthy:
            try:
                self._meeting.gather(None, timeout=PARTING_TIMEOUT)
            except SetupError:
                self.tell_why("it closed its communicator")
        self._exit()

    def _on_death(self, peer: int) -> None:
        if self.boards[peer].state is State.OPEN:
            self.end.abort(int(Fault.DIED), peer)


def _leave(board: Board, watch: Watch | None, pid: int) -> None:
    if os.getpid() == pid:
        board.state = State.CLOSED
        if watch is not None:
            watch.stop()


def _geometry(ranks: int, scratch: Scratch, heap_bytes: int) -> _cpu.Geometry:
    return _cpu.Geometry(
        ranks=ranks,
        teams=scratch.teams,
        slots=scratch.slots,
        slot_bytes=scratch.slot_bytes,
        window_bytes=scratch.window_bytes,
        heap_bytes=heap_bytes,
    )


def check_terms(terms: Sequence[Mapping[str, Any]]) -> None:
    """Raise SetupError, the same on every rank, when ranks bring other terms than rank 0."""
    for rank, theirs in enumerate(terms):
        for name, value in terms[0].items():
            if theirs.get(name) != value:
                raise SetupError(
                    f"Communicator: ranks need the same `{name}`; rank 0 has {value!r}, rank {rank} has {theirs.get(name)!r}."
                )


def _map(there: Mapping[str, Any], own: tuple[Segment, Segment]) -> tuple[Segment, Segment]:
    if "segments" in there:
        arena, board = there["segments"]
        return arena, board
    if there["machine"] != platform.node():
        raise SetupError(
            f"Communicator: all ranks need to be on one machine; this is {platform.node()!r}, a peer is on {there['machine']!r}. "
            "Use torch.distributed for the axis between machines."
        )
    arena_fd, board_fd = there["files"]
    return Segment.of_peer(there["pid"], arena_fd, own[0].bytes), Segment.of_peer(there["pid"], board_fd, own[1].bytes)
