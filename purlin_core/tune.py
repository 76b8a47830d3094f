"""Which regime a call takes. Every input here is the same on all ranks, so all ranks choose alike."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from purlin_core.errors import SetupError
from purlin_core.moves import WIRE_ALIGN, Kind

# Up to here a message goes as packets on the CPU: a line at a time costs more than memcpy, and saves the notify.
CPU_PACKET_BYTES = 512


class Regime(IntEnum):
    """Where a source stages. The numbers are those of csrc/purlin/spec.hpp."""

    STAGED = 0  # a ring of slots in the reader's inbox
    PACKET = 1  # lines of payload and tag: one message, no notify
    DIRECT = 2  # the reader's own output, granted for this call


@dataclass(frozen=True)
class Scratch:
    """Sizes of a rank's inbox, the same on all ranks. `window_bytes` is what one packet message of one team can carry."""

    teams: int
    slots: int
    slot_bytes: int
    window_bytes: int
    packet_bytes: int  # the largest message that goes as packets

    def __post_init__(self) -> None:
        lines = (self.slot_bytes, self.window_bytes)
        if min(self.teams, self.slots, *lines) < 1 or any(size % WIRE_ALIGN for size in lines):
            raise SetupError(
                f"Scratch: needs teams and slots of 1 or more, slot and window bytes divisible by {WIRE_ALIGN}; got {self}."
            )


@dataclass(frozen=True)
class Schedule:
    regime: Regime
    teams: int
    lag: int
    why: str


def cpu_scratch(ranks: int, *, teams: int = 1) -> Scratch:
    """DESIGN's sizes for the CPU: at most 11 MiB at 2 ranks, 44 MiB up to 16.

    Slots of 256 KiB, shared by the teams; 8 of them up to 6 ranks, 4 above; packets max(teams x 4 KiB, 512 KiB / (ranks - 1)) a pair.
    """
    windows = max(teams * 4096, (512 << 10) // max(ranks - 1, 1))
    return Scratch(
        teams=teams,
        slots=8 if ranks <= 6 else 4,
        slot_bytes=max(16 << 10, (256 << 10) // teams // 16 * 16),
        window_bytes=-(-windows // teams // 16) * 16,
        packet_bytes=CPU_PACKET_BYTES,
    )


def most_teams(ranks: int) -> int:
    """More would take more scratch than DESIGN allows."""
    return 32 if ranks <= 8 else 16


def choose(kind: Kind, scratch: Scratch, *, largest: int, granted: bool) -> Schedule:
    """The schedule of a call whose largest message of one rank to another has `largest` bytes; `granted`: its outputs lie in the arena's heap."""
    packets = min(scratch.teams * scratch.window_bytes, scratch.packet_bytes)
    if kind is not Kind.ALL_REDUCE and largest <= packets:
        return Schedule(Regime.PACKET, scratch.teams, 0, f"no message is larger than {packets} bytes")
    if granted and kind is Kind.COPY:
        return Schedule(Regime.DIRECT, scratch.teams, 0, "the outputs lie in memory that can be granted")
    return Schedule(Regime.STAGED, scratch.teams, scratch.slots // 2, "ordinary outputs, messages larger than packets")
