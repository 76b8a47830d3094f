"""From the few bits a dying call leaves behind to an error with names in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from purlin_core.board import Board
from purlin_core.errors import MismatchError, PeerError, PurlinError, StallError
from purlin_core.prepare import GRANTED, LENT


class Fault(IntEnum):
    """Why a communicator is dead. The numbers are those of csrc/purlin/fault.hpp."""

    NONE = 0
    STALL = 1
    MISMATCH = 2
    GRANT = 3
    LEFT = 4
    DIED = 5
    INTERRUPTED = 6


_AWAITED = (  # by Where::What in csrc/purlin/atom/concept.hpp
    "rank {peer} (a free slot, {where})",
    "rank {peer} (a message, {where})",
    "rank {peer} (a granted tensor, {where})",
    "its own message to rank {peer} to be sent ({where})",
)
_USES = ("ring", "gather ring", "packets", "direct", "ring")  # by Use in csrc/purlin/channel.hpp

FAREWELL = (1 << 40) - 1, (1 << 24) - 1  # post() of a rank that has left: csrc/purlin/fault.hpp


class End(Protocol):
    """The endpoint of a rank, as csrc/bindings.cpp shows it."""

    @property
    def fault(self) -> tuple[int, int, int]: ...
    @property
    def stalled(self) -> tuple[int, int, int, int, int]: ...
    @property
    def calls(self) -> int: ...
    def post(self, rank: int) -> tuple[int, int]: ...


@dataclass(frozen=True)
class Scene:
    """What a rank can see when its communicator has died."""

    rank: int
    end: End
    boards: Sequence[Board]
    timeout: float
    call: str  # the call this rank is in, or last made
    signature: int


def error_of(scene: Scene) -> PurlinError | None:
    """The error this rank raises, or None when nothing is wrong."""
    what, by, about = scene.end.fault
    fault = Fault(what)
    if fault is Fault.NONE:
        return None
    if fault is Fault.STALL:
        return StallError(
            f"{_at_call(scene)}: rank {by} waited {scene.timeout:g} s for {_awaited(scene, by, about)}; {_whereabouts(scene, about)}."
        )
    if fault is Fault.MISMATCH:
        return MismatchError(
            f"{_at_call(scene)}: ranks disagree. {_says(scene, by)}; {_says(scene, about)}.{_cure(scene, by, about)}"
        )
    if fault is Fault.GRANT:
        return MismatchError(
            f"{_at_call(scene)}: rank {about} granted rank {by} a tensor that does not lie in its arena with room for the call."
        )
    if fault is Fault.DIED:
        return PeerError(f"{_at_call(scene)}: rank {about} died (noticed by rank {by}).")
    if fault is Fault.INTERRUPTED:
        return PeerError(f"{_at_call(scene)}: rank {by} left: KeyboardInterrupt.")
    return left(scene, by)


def left(scene: Scene, by: int) -> PeerError:
    """Rank `by` is gone, for the reason on its board."""
    reason = scene.boards[by].reason or "it called abort()"
    return PeerError(f"{_at_call(scene)}: rank {by} left: {reason.rstrip('.')}.")


def _at_call(scene: Scene) -> str:
    return f"{scene.call or 'communicator'} (call #{scene.end.calls})"


def _awaited(scene: Scene, by: int, about: int) -> str:
    if by != scene.rank:
        return f"rank {about}"
    what, use, step, team, _ = scene.end.stalled
    return _AWAITED[what].format(peer=about, where=f"{_USES[use]}, team {team}, chunk {step}")


def _whereabouts(scene: Scene, rank: int) -> str:
    if rank == scene.rank:
        return f"rank {rank} is at call #{scene.end.calls}"
    if _has_left(scene, rank):
        return f"rank {rank} has left since"
    calls, _ = scene.end.post(rank)
    if calls >= scene.end.calls:
        return f"rank {rank} last entered call #{calls}"
    return f"rank {rank} has not entered call #{scene.end.calls}{_refusal(scene, rank, calls)}"


def _refusal(scene: Scene, rank: int, entered: int) -> str:
    """What the rank has refused since the call that it entered last, unless this one has, too."""
    why = scene.boards[rank].refused(entered)
    if not why or why == scene.boards[scene.rank].refused(scene.end.calls - 1):
        return ""
    return f", and since it entered #{entered} has refused a call: {why.rstrip('.')}"


def _has_left(scene: Scene, rank: int) -> bool:
    return rank != scene.rank and scene.end.post(rank) == FAREWELL


def _signature(scene: Scene, rank: int) -> int:
    return scene.signature if rank == scene.rank else scene.end.post(rank)[1]


def _text(scene: Scene, rank: int) -> str | None:
    return scene.call if rank == scene.rank else scene.boards[rank].text(_signature(scene, rank))


def _says(scene: Scene, rank: int) -> str:
    if _has_left(scene, rank):
        return f"rank {rank} has left since"
    return f"rank {rank} called {_text(scene, rank) or f'signature {_signature(scene, rank):06x}'}"


def _cure(scene: Scene, by: int, about: int) -> str:
    """What to do where the calls differ in nothing that their texts show, or in where their tensors lie alone."""
    if _has_left(scene, by) or _has_left(scene, about):
        return ""
    if _signature(scene, by) == _signature(scene, about):
        return " They agree on the call but not on the bytes that go between them: compare in_sizes and out_sizes."
    texts = {rank: _text(scene, rank) or "" for rank in (by, about)}
    for what, ending in (("output", GRANTED), ("input", LENT)):
        there = [rank for rank, text in texts.items() if text.endswith(ending)]
        if len(there) == 1 and len({text.removesuffix(ending) for text in texts.values()}) == 1:
            return (
                f" They differ in where the {what} lies alone: rank {there[0]}'s is of comm.empty(). Pass tensors of comm.empty() on all ranks,"
                " or on none; and where calls make results there themselves (`granted_results`), let all ranks hold on to the same ones."
            )
    return ""
