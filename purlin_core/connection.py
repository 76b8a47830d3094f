"""How one rank is tied to its peers: the arena they write, the boards all read, the endpoint that runs calls, and how it all ends."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from purlin_core import _cpu
from purlin_core.atom import Atom
from purlin_core.board import BOARD_BYTES, Board, State
from purlin_core.canary import Canaries
from purlin_core.errors import PurlinError, SetupError
from purlin_core.failure import Fault, Scene, error_of, left
from purlin_core.heap import Heap
from purlin_core.lane import Lane
from purlin_core.memory import GUARD_BYTES, Addressed, HostMemory, Segment
from purlin_core.prepare import Prepared, Site
from purlin_core.probe import probe
from purlin_core.recorder import Recorder
from purlin_core.rendezvous import LocalRendezvous, Rendezvous
from purlin_core.settings import Settings
from purlin_core.terms import card_of, check_cards, terms_of
from purlin_core.tune import Scratch, Tuning
from purlin_core.watch import Watch

PARTING_TIMEOUT = 5.0  # seconds that close() waits for the peers
ENDING_SECONDS = 2.0  # that a kernel takes at most to notice that its time is up

_left_behind: list[_Ending] = []  # on purpose: memory that a kernel may still use


class Connection:
    """Made by all ranks together; raises SetupError on all of them when they do not fit. Dead after the first fault, for good."""

    def __init__(
        self,
        meeting: Rendezvous,
        atom: Atom,
        scratch: Scratch,
        tuning: Tuning,
        settings: Settings,
        *,
        heap_bytes: int,
        blocks: int,
        timeout: float,
        setup_timeout: float,
    ) -> None:
        self.rank, self.ranks = meeting.rank, meeting.ranks
        self.timeout = timeout
        self.lane = atom.lane()
        self._meeting, self._setup_timeout = meeting, setup_timeout
        with atom.current():
            self._set_up(atom, scratch, tuning, settings, heap_bytes, blocks)
        self._exit = weakref.finalize(self, self._ending.leave)
        self.recorder: Recorder | None = None
        self._died_in: tuple[str, int] | None = None  # text and signature of a call
        self.bare = self.lane is None and self.canaries is None  # a call is all there is to do
        if self.lane is not None:
            self._probe(self.lane)

    def _set_up(
        self, atom: Atom, scratch: Scratch, tuning: Tuning, settings: Settings, heap_bytes: int, blocks: int
    ) -> None:
        meeting, timeout = self._meeting, self._setup_timeout
        local = isinstance(meeting, LocalRendezvous)
        _check_room(meeting, atom, scratch.teams)
        atom.native.give_back()
        geometry = _geometry(atom, self.ranks, scratch, heap_bytes)
        boards, arenas = HostMemory(local=local), atom.memory(meeting, timeout=timeout)
        arena = _allocated(lambda: arenas.make(geometry.arena_bytes), atom)
        board = boards.make(BOARD_BYTES)
        try:
            card = card_of(atom, terms_of(atom, self.ranks, scratch, tuning, settings, heap_bytes))
            memory = {"board": boards.tell(board), "arena": arenas.tell(arena)}
            cards = meeting.gather(card | memory, timeout=timeout)
            check_cards(cards, atom, local=local)
            pids = [there["pid"] for there in cards]
            texts = boards.map(board, self.rank, [there["board"] for there in cards], pids)
            places = _allocated(lambda: arenas.map(arena, self.rank, [there["arena"] for there in cards], pids), atom)
            self.boards = [Board(text) for text in texts]
            self.heap = Heap(arena, geometry.heap_at, heap_bytes, guarded=settings.check)
            self.canaries: Canaries | None = None
            if settings.check:
                self.canaries = Canaries(arena, _behind(geometry), self.heap)
            self.site = Site(self.rank, self.ranks, scratch, geometry, atom, tuning, blocks)
            addresses = [place.address for place in places]
            self.end: _cpu.Endpoint = _allocated(
                lambda: atom.native.Endpoint(self.rank, geometry, arenas=addresses, timeout_s=self.timeout), atom
            )
            # now all have mapped and set their words: peers may write
            ends = meeting.gather(self.end if local else None, timeout=timeout)
            if isinstance(meeting, LocalRendezvous) and meeting.fused:
                self._agree(_fused(atom, ends) if self.rank == 0 else "")
        finally:
            board.forget()
            arena.forget()
        others = {r: pid for r, pid in enumerate(pids) if r != self.rank}
        watch = None if local else Watch(others, _teller(self))
        mapped = list(zip(places, texts, strict=True))
        self._ending = _Ending(self.end, mapped, arena, self.boards[self.rank], watch, self.lane, os.getpid())

    def _agree(self, problem: str) -> None:
        """Raise SetupError on all ranks when one of them has a problem."""
        for rank, theirs in enumerate(self.gather(problem)):
            if theirs:
                raise SetupError(f"Communicator: rank {rank}: {theirs}.")

    def _probe(self, lane: Lane) -> None:
        ready = partial(self.gather, None)
        problem = probe(self.site, self.end, lane, ready=ready, timeout=self._setup_timeout / 2)
        try:
            self._agree(problem)
        except SetupError:
            self.end.abort(int(Fault.LEFT), self.rank)  # a kernel may still wait
            raise

    @property
    def healthy(self) -> bool:
        return self.end.fault[0] == int(Fault.NONE)

    @property
    def entered(self) -> int:
        """The number of the call that this rank entered last, 0 before the first; replays of a CUDA graph are not counted."""
        return self.end.calls - (self.lane is None)  # `end` of a CPU rank counts the call that comes next

    @property
    def capturing(self) -> bool:
        """Would a call now be captured into a CUDA graph?"""
        return self.lane is not None and self.lane.capturing()

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.gather(value, timeout=self._setup_timeout)

    def error(self, last: Prepared | None) -> PurlinError | None:
        """What killed this connection, in words, as seen by a rank whose latest call is `last`."""
        text, signature = (last.text, last.signature) if last else ("", 0)
        if self.lane is not None:  # what failed may be a call enqueued long before
            failed = getattr(self.end, "signature", 0)
            text, signature = self.boards[self.rank].text(failed) or text, failed or signature
        text, signature = self._died_in or (text, signature)  # a later call is not the one that failed
        scene = Scene(self.rank, self.end, self.boards, self.timeout, text, signature)
        error = error_of(scene) or self._aborted(scene)
        if error is not None:
            self._died_in = text, signature
        return error

    def _aborted(self, scene: Scene) -> PurlinError | None:
        """On a GPU only a call meets a peer's word; its board says it sooner."""
        aborted = [r for r, board in enumerate(self.boards) if board.state is State.ABORTED]
        return left(scene, aborted[0]) if aborted else None

    def tell_why(self, reason: str) -> None:
        """Kill the connection; every rank's pending or next call raises PeerError with this reason."""
        self.boards[self.rank].reason = reason
        self.boards[self.rank].state = State.ABORTED
        self.end.abort(int(Fault.LEFT), self.rank)

    def part(self) -> None:
        """Leave when all calls have ended, together with the peers when they come in time. After a fault, say so and go."""
        if self.lane is not None and not self.lane.settled(self.timeout + ENDING_SECONDS):
            self.end.abort(int(Fault.LEFT), self.rank)
        self._ending.say()
        with suppress(SetupError):
            self._meeting.gather(None, timeout=PARTING_TIMEOUT if self.healthy else 0.001)
        self._exit()
        self.canaries = None
        self.heap.close()
        del self.end, self._ending  # and with them the memory, when the last rank has gone

    def give_back(self, *, amid_calls: bool = False) -> None:
        """Give back the memory of what was dropped. `amid_calls`: not where the kernel of another rank may wait for this thread's next call."""
        apart = isinstance(self._meeting, LocalRendezvous) and not self._meeting.fused
        if not (amid_calls and apart):
            self.site.atom.native.give_back()

    def _on_death(self, peer: int) -> None:
        if self.boards[peer].state is State.OPEN:
            self.end.abort(int(Fault.DIED), peer)


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
    mapped: Sequence[tuple[Addressed, Segment]]  # arena and board of each rank; `end` knows their addresses only
    arena: object  # this rank's own
    board: Board
    watch: Watch | None
    lane: Lane | None
    pid: int

    def say(self) -> None:
        """Whoever waits for this rank need not wait any longer."""
        if not self.board.reason:
            self.board.reason = "it closed its communicator"
        self.end.leave()

    def leave(self) -> None:
        if os.getpid() != self.pid:  # a forked child owns none of this
            return
        if self.lane is not None and not self.lane.settled(ENDING_SECONDS):
            _left_behind.append(self)
        if self.lane is None or not self.lane.capturing():
            self.say()
        if self.board.state is State.OPEN:
            self.board.state = State.CLOSED
        if self.watch is not None:
            self.watch.stop()


def _allocated(make: Callable[[], Any], atom: Atom) -> Any:
    """What `make` returns; when the device refuses, why, as a SetupError."""
    try:
        return make()
    except PurlinError:
        raise
    except (RuntimeError, OSError, OverflowError) as error:
        cure = "An NVIDIA driver older than 580 does not run what CUDA 13 built. " if "driver" in str(error) else ""
        raise SetupError(f"Communicator: '{atom.device}' failed: {error}. {cure}") from error


def _check_room(meeting: Rendezvous, atom: Atom, teams: int) -> None:
    """Kernels of their own that wait for each other need to be on the GPU at once, a team a block. Raises SetupError."""
    sharing = meeting.sharing if isinstance(meeting, LocalRendezvous) and not meeting.fused else 1
    if sharing > 1 and sharing * teams > atom.processors:
        raise SetupError(
            f"LocalWorld: {sharing} ranks of {teams} teams need {sharing * teams} multiprocessors; '{atom.device}' has {atom.processors}. "
            f"Pass teams={max(1, atom.processors // sharing)} or less, or fused=True."
        )


def _fused(atom: Atom, ends: Sequence[Any]) -> str:
    """Let the calls of these ranks run as one; why not, when they cannot."""
    try:
        atom.native.fuse(ends)
    except ValueError as error:
        return str(error)
    return ""


def _geometry(atom: Atom, ranks: int, scratch: Scratch, heap_bytes: int) -> _cpu.Geometry:
    geometry: _cpu.Geometry = atom.native.Geometry(
        ranks=ranks,
        teams=scratch.teams,
        slots=scratch.slots,
        slot_bytes=scratch.slot_bytes,
        window_bytes=scratch.window_bytes,
        heap_bytes=heap_bytes,
    )
    return geometry


def _behind(geometry: _cpu.Geometry) -> dict[int, str]:
    """Where in an arena the regions that peers write end; csrc/purlin/channel.hpp leaves a line behind each."""
    ends = (geometry.rings_at, geometry.packets_at, geometry.heap_at, geometry.arena_bytes)
    names = ("the words", "the ring slots", "the packet windows", "the heap")
    return {end - GUARD_BYTES: name for end, name in zip(ends, names, strict=True)}
