"""Which regime a call takes, with how many teams. Every input here is the same on all ranks, so all ranks choose alike.

On the CPU by rules. On a GPU by the rows of its table, which scripts/tune.py measured, and by rules where there is none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from purlin_core.errors import SetupError
from purlin_core.moves import WIRE_ALIGN, Kind
from purlin_core.plan import AllReduce

KIB, MIB = 1 << 10, 1 << 20
RULES = 4  # of choose(); ranks whose rules differ refuse each other

# Up to here a message goes as packets on the CPU: a line at a time costs more than memcpy, and saves the notify.
CPU_PACKET_BYTES = 512
# On a GPU a packet moves its payload twice, and saves the fence and the notify.
CUDA_PACKET_BYTES = MIB
GRANTED_PACKET_BYTES = 512 * KIB  # beyond, a copy that may be direct is faster so
GRANTED_SUM_PACKET_BYTES = 256 * KIB  # the same of a reduction
# What a team is given before there is another one.
PACKET_TEAM_BYTES, CHUNK_TEAM_BYTES = 4 * KIB, 16 * KIB
# From here on a team on a GPU has a block for each of its roles: in one, what it copies at home holds up what it sends. Second: in a direct call.
# Through rings as many bytes that stay at home have a block of their own, too: else they hold up what is taken.
PARTS_TEAM_BYTES, DIRECT_PARTS_TEAM_BYTES = 64 * KIB, 16 * KIB
# In place a direct call copies nothing at home, and one block is as fast until there is much: then blocks that have next to nothing to do leave
# those that send every other place on the GPU (256 MiB between two H200: 372 to 386 us in five runs, and 387 to 388 with one block a team).
IN_PLACE_PARTS_TEAM_BYTES = 512 * KIB

PACKET_SLOTS = 4  # as in csrc/purlin/channel.hpp
CUDA_SLOT_BYTES = 64 * KIB  # large: what a chunk costs beside its bytes is a microsecond
CUDA_INBOX_BYTES = 64 * MIB  # ring slots and packet windows of a communicator, at most
TABLES = Path(__file__).with_name("tables")


class Regime(IntEnum):
    """Where a source stages. The numbers are those of csrc/purlin/spec.hpp."""

    STAGED = 0  # a ring of slots in the reader's inbox
    PACKET = 1  # lines of payload and tag: one message, no notify
    DIRECT = 2  # the reader's own output, granted for this call; or peers read what a rank has lent


# ---- how large an inbox is -------------------------------------------------------------------------------------------


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

    @property
    def most_packet_bytes(self) -> int:
        """The largest message that may go as packets and fits."""
        return min(self.teams * self.window_bytes, self.packet_bytes)


def cpu_scratch(ranks: int, *, teams: int = 1) -> Scratch:
    """The sizes for the CPU: at most 11 MiB at 2 ranks, 44 MiB up to 16.

    Slots of 256 KiB, shared by the teams; 8 of them up to 6 ranks, 4 above; packets max(teams x 4 KiB, 512 KiB / (ranks - 1)) a pair.
    """
    return Scratch(
        teams=teams,
        slots=8 if ranks <= 6 else 4,
        slot_bytes=max(16 << 10, (256 << 10) // teams // 16 * 16),
        window_bytes=_window_bytes(ranks, teams, 512 * KIB),
        packet_bytes=CPU_PACKET_BYTES,
    )


def cuda_scratch(ranks: int) -> Scratch:
    """Sizes for a GPU: at most 64 MiB at any rank count, 40 MiB at 2 ranks.

    32 teams, 16 above 8 ranks; 8 slots of 64 KiB, or 4 where they would not fit, smaller where those would not; packets
    max(teams x 4 KiB, 1 MiB / (ranks - 1)) a pair.
    """
    teams = most_teams(ranks)
    windows = _window_bytes(ranks, teams, CUDA_PACKET_BYTES)
    slot_bytes = CUDA_SLOT_BYTES
    slots = 8 if _cuda_inbox_bytes(ranks, teams, 8, slot_bytes, windows) <= CUDA_INBOX_BYTES else 4
    while slot_bytes > 4 * KIB and _cuda_inbox_bytes(ranks, teams, slots, slot_bytes, windows) > CUDA_INBOX_BYTES:
        slot_bytes -= 4 * KIB
    return Scratch(teams, slots, slot_bytes, windows, CUDA_PACKET_BYTES)


def most_teams(ranks: int) -> int:
    """More would take more than 64 MiB of scratch."""
    return 32 if ranks <= 8 else 16


def _window_bytes(ranks: int, teams: int, all_bytes: int) -> int:
    """Of one team of one pair, when the packets of all peers together have `all_bytes`."""
    pair = max(teams * 4096, all_bytes // max(ranks - 1, 1))
    return -(-pair // teams // WIRE_ALIGN) * WIRE_ALIGN


def _cuda_inbox_bytes(ranks: int, teams: int, slots: int, slot_bytes: int, window_bytes: int) -> int:
    """What csrc/purlin/channel.hpp lays out: two rings, four windows whose lines are half tags, words and paddings."""
    words = 128 * -(-slots // 8) + 256
    channel = 2 * slots * slot_bytes + PACKET_SLOTS * 2 * window_bytes + words
    return (ranks - 1) * teams * channel + 64 * KIB


# ---- what has been measured ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """For calls whose largest message of one rank to another has up to `up_to_bytes`; None: whatever the name, ranks, grant or size."""

    name: str | None  # as Spec.kind_name
    ranks: int | None
    granted: bool | None
    up_to_bytes: int | None
    regime: Regime
    teams: int
    lag: int

    def __str__(self) -> str:
        grant = {True: "granted", False: "not granted", None: "granted or not"}[self.granted]
        size = "any size" if self.up_to_bytes is None else f"up to {self.up_to_bytes} bytes"
        return f"{self.name or 'any collective'}, {self.ranks or 'any'} ranks, {grant}, {size}"

    def speaks_of(self, name: str, ranks: int, granted: bool, largest: int) -> bool:
        return (
            self.name in (None, name)
            and self.ranks in (None, ranks)
            and self.granted in (None, granted)
            and (self.up_to_bytes is None or largest <= self.up_to_bytes)
        )

    @property
    def looseness(self) -> tuple[bool, bool, bool, float]:
        """The least one is asked first: what names a thing goes before what takes any, and then the smallest bound."""
        bound = float("inf") if self.up_to_bytes is None else self.up_to_bytes
        return self.name is None, self.ranks is None, self.granted is None, bound


@dataclass(frozen=True)
class Tuning:
    """What choose() goes by on one kind of machine."""

    gpu: str  # its name, as torch.cuda.get_device_name says it; "" for the CPU
    rows: tuple[Row, ...] = ()  # least loose first
    source: str = ""  # the table's name

    @staticmethod
    def host() -> Tuning:
        """For the CPU."""
        return Tuning("")

    @staticmethod
    def of_gpu(name: str) -> Tuning:
        """For the GPU that torch.cuda.get_device_name calls `name`: its table, or rules alone. Raises SetupError where its table is bad."""
        table = TABLES / f"{slug(name)}.json"
        return read_table(table, gpu=name) if table.exists() else Tuning(name)

    @cached_property
    def hash(self) -> str:
        """12 hex digits of all that choose() depends on: ranks that are to work together need the same."""
        kind = "cuda" if self.gpu else "host"
        rows = [asdict(row) for row in self.rows]
        return hashlib.blake2b(json.dumps([RULES, kind, rows]).encode(), digest_size=6).hexdigest()


def slug(gpu: str) -> str:
    """The name of a GPU's table, without suffix: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


# ---- the choice ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    regime: Regime
    teams: int
    lag: int
    why: str
    parts: int = 1  # blocks of a GPU that a team has

    @property
    def ctas(self) -> int:
        """Blocks of a GPU that a call takes."""
        return self.teams * self.parts


def choose(
    tuning: Tuning,
    kind: Kind,
    scratch: Scratch,
    *,
    largest: int,
    granted: bool,
    name: str,
    ranks: int,
    blocks: int = 0,
    own: int = 0,
) -> Schedule:
    """The schedule of a call `name` (Spec.kind_name) of `kind` whose largest message of one rank to another has `largest` bytes.

    `kind` and `largest` are those of an all-reduce in one exchange, where it is one. `granted`: what peers write or read of a direct call
    lies in the arena's heap: its outputs, or the inputs of a reduce-scatter.
    `blocks`: how many of the GPU's the call may take, beyond one a team. `own`: bytes that this rank copies at home; no other rank needs to
    know them, for they decide about its blocks alone.
    """
    if not tuning.gpu:
        return _of_host(kind, scratch, largest, granted, name)
    schedule = _of_gpu(tuning, kind, scratch, largest, granted, name, ranks)
    if kind is not Kind.COPY and schedule.regime is Regime.DIRECT:  # all lanes of a block add
        return schedule
    joined = name == "all_reduce" and how_all_reduce(tuning, schedule.regime, ranks) is AllReduce.JOINED
    roles = copying_roles(schedule, own) if kind is Kind.COPY else (3,) if joined else (2,)
    return with_parts(schedule, largest=largest, blocks=blocks, roles=roles)


def how_all_reduce(tuning: Tuning, regime: Regime, ranks: int) -> AllReduce:
    """In one exchange as packets, and through rings of two ranks on GPUs: of two as many bytes cross the link either way, and each waits once, not
    twice. On the CPU it would be more bytes to copy."""
    if regime is Regime.PACKET or (regime is Regime.STAGED and tuning.gpu and ranks == 2):
        return AllReduce.ONE_SHOT
    return AllReduce.JOINED


def copying_roles(schedule: Schedule, own: int) -> tuple[int, ...]:
    """How many roles a team of a copy may have, the most first, where `own` bytes are copied at home: through rings that is a role, if many."""
    third = schedule.regime is Regime.STAGED and own >= schedule.teams * PARTS_TEAM_BYTES
    return (3, 2) if third else (2,)


def with_parts(schedule: Schedule, *, largest: int, blocks: int, roles: Sequence[int]) -> Schedule:
    """A block for each role of a team, where the largest message has `largest` bytes: the first of `roles` that `blocks` are enough for, else 1."""
    bound = DIRECT_PARTS_TEAM_BYTES if schedule.regime is Regime.DIRECT else PARTS_TEAM_BYTES
    if schedule.regime is Regime.PACKET or largest < schedule.teams * bound:
        return replace(schedule, parts=1)
    return replace(schedule, parts=next((parts for parts in roles if parts * schedule.teams <= blocks), 1))


def _of_gpu(
    tuning: Tuning, kind: Kind, scratch: Scratch, largest: int, granted: bool, name: str, ranks: int
) -> Schedule:
    for row in tuning.rows:
        if row.speaks_of(name, ranks, granted, largest) and _can(row, scratch, largest, granted):
            lag = min(row.lag, scratch.slots - 1) if row.regime is Regime.STAGED else 0
            return Schedule(row.regime, min(row.teams, scratch.teams), lag, f"row {row} of {tuning.source}")
    return _by_rule(kind, scratch, largest, granted, name, ranks)


def _of_host(kind: Kind, scratch: Scratch, largest: int, granted: bool, name: str) -> Schedule:
    packets = scratch.most_packet_bytes
    if kind is not Kind.ALL_REDUCE and largest <= packets:
        return Schedule(Regime.PACKET, scratch.teams, 0, f"no message is larger than {packets} bytes")
    if granted:
        return Schedule(Regime.DIRECT, scratch.teams, 0, _why_direct(name))
    return Schedule(Regime.STAGED, scratch.teams, scratch.slots // 2, "ordinary outputs, messages larger than packets")


def _can(row: Row, scratch: Scratch, largest: int, granted: bool) -> bool:
    """Whether a call can be run as the row has it."""
    if row.regime is Regime.DIRECT:
        return granted
    if row.regime is Regime.PACKET:
        return largest <= min(scratch.packet_bytes, min(row.teams, scratch.teams) * scratch.window_bytes)
    return True


def _by_rule(kind: Kind, scratch: Scratch, largest: int, granted: bool, name: str, ranks: int) -> Schedule:
    if name == "local":
        return Schedule(Regime.PACKET, scratch.teams, 0, "rule: nothing is sent")
    packets = scratch.most_packet_bytes
    if granted:
        packets = min(packets, GRANTED_PACKET_BYTES if kind is Kind.COPY else GRANTED_SUM_PACKET_BYTES)
    if name == "all_reduce":  # in one exchange every rank sends all it has to every other
        packets //= max(ranks - 1, 1)
    if kind is not Kind.ALL_REDUCE and largest <= packets:
        share = min(PACKET_TEAM_BYTES, scratch.window_bytes)
        why = f"rule: no message is larger than {packets} bytes"
        return Schedule(Regime.PACKET, _teams(largest, share, scratch), 0, why)
    teams = _teams(largest, CHUNK_TEAM_BYTES, scratch)
    if granted:
        return Schedule(Regime.DIRECT, teams, 0, f"rule: {_why_direct(name)}")
    why = "rule: ordinary outputs, messages larger than packets"
    return Schedule(Regime.STAGED, teams, scratch.slots // 2, why)


def _why_direct(name: str) -> str:
    lent = name == "reduce_scatter"
    return "the inputs lie in memory that can be lent" if lent else "the outputs lie in memory that can be granted"


def _teams(largest: int, share: int, scratch: Scratch) -> int:
    return max(1, min(-(-largest // share), scratch.teams))


# ---- tables ----------------------------------------------------------------------------------------------------------

FIELDS = ("gpu", "date", "commit", "versions", "rows")


def read_table(path: Path, *, gpu: str) -> Tuning:
    """The table of `gpu` in a JSON file. Raises SetupError, which names the file, the row and what is wrong with it."""
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SetupError(f"{path.name}: a tuning table needs to be JSON that can be read; {error}.") from error
    missing = [field for field in FIELDS if not isinstance(table, dict) or field not in table]
    if missing:
        raise SetupError(f"{path.name}: a tuning table needs {', '.join(FIELDS)}; {missing[0]!r} is missing.")
    if table["gpu"] != gpu:
        raise SetupError(f"{path.name}: needs to be the table of {gpu!r}; it is that of {table['gpu']!r}.")
    if not isinstance(table["rows"], list):
        raise SetupError(f"{path.name}: `rows` needs to be a list; got {table['rows']!r}.")
    rows = [_row(fields, f"{path.name}: row {i}") for i, fields in enumerate(table["rows"])]
    return Tuning(gpu, tuple(sorted(rows, key=lambda row: row.looseness)), path.name)


def _row(fields: Mapping[str, Any], where: str) -> Row:
    """ "*" in the file is None here."""
    wanted = ("name", "ranks", "granted", "up_to_bytes", "regime", "teams", "lag")
    if not isinstance(fields, dict) or set(fields) != set(wanted):
        raise SetupError(f"{where} needs {', '.join(wanted)} and nothing else; got {fields!r}.")
    checks = {
        "name": ('a collective or "*"', fields["name"] == "*" or fields["name"] in NAMES),
        "ranks": ('2 or more or "*"', fields["ranks"] == "*" or _count(fields["ranks"], 2)),
        "granted": ('true, false or "*"', fields["granted"] == "*" or isinstance(fields["granted"], bool)),
        "up_to_bytes": ('bytes or "*"', fields["up_to_bytes"] == "*" or _count(fields["up_to_bytes"], 0)),
        "regime": ("packet, staged or direct", str(fields["regime"]) in REGIMES),
        "teams": ("1 to 32", _count(fields["teams"], 1) and fields["teams"] <= 32),
        "lag": ("0 or more", _count(fields["lag"], 0)),
    }
    for field, (needed, right) in checks.items():
        if not right:
            raise SetupError(f"{where}: `{field}` needs to be {needed}; got {fields[field]!r}.")
    if fields["regime"] == "direct" and fields["granted"] is not True:
        raise SetupError(f"{where}: only what is granted can be written or read directly; `granted` needs to be true.")
    name, ranks, granted, up_to_bytes = (None if fields[key] == "*" else fields[key] for key in wanted[:4])
    return Row(name, ranks, granted, up_to_bytes, REGIMES[fields["regime"]], fields["teams"], fields["lag"])


NAMES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "halo")
REGIMES = {regime.name.lower(): regime for regime in Regime}


def _count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
