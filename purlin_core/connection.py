"""How one rank is tied to its peers: the arena they write, the boards all read, the endpoint that runs calls, and how it all ends."""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from purlin_core import _cpu
from purlin_core.board import BOARD_BYTES, Board, State
from purlin_core.canary import Canaries
from purlin_core.errors import PurlinError, SetupError
from purlin_core.failure import Fault, Scene, error_of
from purlin_core.memory import GUARD_BYTES, Heap, Segment
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
        try:
            everyone = meeting.gather(_card(own, terms, local=local), timeout=setup_timeout)
            check_terms([there["terms"] for there in everyone])
            mapped = [own if r == self.rank else _map(there, own) for r, there in enumerate(everyone)]
            self.boards = [Board(board) for _, board in mapped]
            self.heap = Heap(own[0], geometry.heap_at, heap_bytes, guarded=settings.check)
            self.canaries = Canaries(own[0], _behind(geometry), self.heap) if settings.check else None
            self.site = Site(self.rank, self.ranks, scratch, geometry)
            addresses = [arena.address for arena, _ in mapped]
            self.end = _cpu.Endpoint(self.rank, geometry, arenas=addresses, timeout_s=timeout)
            meeting.gather(None, timeout=setup_timeout)  # all have mapped and set their words: now peers may write
        finally:
            for segment in own:
                segment.forget()
        pids = {r: there["pid"] for r, there in enumerate(everyone) if r != self.rank}
        watch = None if local else Watch(pids, _teller(self))
        self._ending = _Ending(self.end, mapped, self.boards[self.rank], watch, os.getpid())
        self._exit = weakref.finalize(self, self._ending.leave)

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
        """Leave, together with the peers when they come in time. After a fault, say so and go."""
        self._ending.say()
        with suppress(SetupError):
            self._meeting.gather(None, timeout=PARTING_TIMEOUT if self.healthy else 0.001)
        self._exit()

    def _on_death(self, peer: int) -> None:
        if self.boards[peer].state is State.OPEN:
            self.end.abort(int(Fault.DIED), peer)


def _card(own: tuple[Segment, Segment], terms: Mapping[str, Any], *, local: bool) -> dict[str, Any]:
    """What a rank tells the others of itself; where all are threads of a process, its memory too."""
    files = [segment.fd for segment in own]
    card: dict[str, Any] = {"machine": platform.node(), "pid": os.getpid(), "files": files, "terms": terms}
    return card | {"segments": own} if local else card


def _teller(connection: Connection) -> Callable[[int], None]:
    """Tells a connection of a death, and does not keep it alive."""
    weak = weakref.WeakMethod(connection._on_death)

    def died(peer: int) -> None:
        tell = weak()
        if tell is not None:
            tell(peer)

    return died


@dataclass(frozen=True)
class _Ending:
    """What leaving needs; it does not keep the connection alive."""

    end: _cpu.Endpoint
    mapped: Sequence[tuple[Segment, Segment]]  # arena and board of each rank; `end` knows their addresses only
    board: Board
    watch: Watch | None
    pid: int

    def say(self) -> None:
        """Whoever waits for this rank need not wait any longer."""
        if not self.board.reason:
            self.board.reason = "it closed its communicator"
        self.end.leave()

    def leave(self) -> None:
        if os.getpid() != self.pid:  # a forked child owns none of this
            return
        self.say()
        self.board.state = State.CLOSED
        if self.watch is not None:
            self.watch.stop()


def _geometry(ranks: int, scratch: Scratch, heap_bytes: int) -> _cpu.Geometry:
    return _cpu.Geometry(
        ranks=ranks,
        teams=scratch.teams,
        slots=scratch.slots,
        slot_bytes=scratch.slot_bytes,
        window_bytes=scratch.window_bytes,
        heap_bytes=heap_bytes,
    )


def _behind(geometry: _cpu.Geometry) -> dict[int, str]:
    """Where in an arena the regions that peers write end; csrc/purlin/channel.hpp leaves a line behind each."""
    ends = (geometry.rings_at, geometry.packets_at, geometry.heap_at, geometry.arena_bytes)
    names = ("the words", "the ring slots", "the packet windows", "the heap")
    return {end - GUARD_BYTES: name for end, name in zip(ends, names, strict=True)}


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
