"""choose(): laws of the rules and of tables; every bad table is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from purlin_core import _cpu
from purlin_core.errors import SetupError
from purlin_core.moves import Kind
from purlin_core.plan import AllReduce
from purlin_core.prepare import Site
from purlin_core.tune import (
    CUDA_PACKET_BYTES,
    DIRECT_PARTS_TEAM_BYTES,
    GRANTED_SUM_PACKET_BYTES,
    MIB,
    PACKET_SLOTS,
    PARTS_TEAM_BYTES,
    TABLES,
    Regime,
    Schedule,
    Scratch,
    Tuning,
    choose,
    cpu_scratch,
    cuda_scratch,
    how_all_reduce,
    read_table,
    slug,
)

RANKS = range(2, 17)
GPU = "NVIDIA Test 100"
RULES = Tuning(GPU)
SIZES = sorted({max(0, (1 << k) + d) for k in range(31) for d in (-16, -1, 0, 1, 16)})
CALLS = {
    "all_gather": Kind.COPY,
    "all_to_all": Kind.COPY,
    "halo": Kind.COPY,
    "reduce_scatter": Kind.REDUCE,
    "all_reduce": Kind.REDUCE,
}


def chosen(
    tuning: Tuning,
    ranks: int,
    largest: int,
    *,
    name: str = "all_gather",
    granted: bool = False,
    blocks: int = 0,
    own: int = 0,
) -> Schedule:
    asked: dict[str, Any] = {"largest": largest, "granted": granted, "name": name, "ranks": ranks}
    return choose(tuning, CALLS[name], cuda_scratch(ranks), blocks=blocks, own=own, **asked)


# ---- how large an inbox is
@pytest.mark.parametrize("ranks", RANKS)
def test_the_inbox_of_a_gpu_stays_within_64_mib(ranks: int) -> None:
    """As channel.hpp lays it out on the CPU, and windows of lines that are half tags in place of its own."""
    scratch = cuda_scratch(ranks)
    sizes = {"teams": scratch.teams, "slots": scratch.slots, "slot_bytes": scratch.slot_bytes}
    laid = _cpu.Geometry(ranks=ranks, **sizes, window_bytes=scratch.window_bytes, heap_bytes=0)
    windows = (ranks - 1) * scratch.teams * PACKET_SLOTS * 2 * scratch.window_bytes
    assert laid.packets_at + windows + 2 * 4096 <= 64 * MIB
    assert scratch.teams == (32 if ranks <= 8 else 16)
    assert scratch.slots == 4 or (scratch.slots == 8 and scratch.slot_bytes == 64 << 10)
    assert scratch.slot_bytes % 4096 == 0
    assert 4096 <= scratch.slot_bytes <= 64 << 10
    assert scratch.teams * scratch.window_bytes >= max(scratch.teams << 12, CUDA_PACKET_BYTES // (ranks - 1))


@pytest.mark.parametrize("ranks", RANKS)
def test_slots_are_no_smaller_than_they_must_be(ranks: int) -> None:
    scratch = cuda_scratch(ranks)
    ring = (ranks - 1) * scratch.teams * 2 * scratch.slots
    windows = (ranks - 1) * scratch.teams * PACKET_SLOTS * 2 * scratch.window_bytes
    assert scratch.slot_bytes == 64 << 10 or ring * (scratch.slot_bytes + 4096) + windows > 63 * MIB


# ---- rules
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_larger_messages_never_get_fewer_teams_nor_go_back_to_packets(name: str, granted: bool, ranks: int) -> None:
    schedules = [chosen(RULES, ranks, size, name=name, granted=granted) for size in SIZES]
    packets = [schedule.regime is Regime.PACKET for schedule in schedules]
    assert packets == sorted(packets, reverse=True)
    for regime in {schedule.regime for schedule in schedules}:
        teams = [schedule.teams for schedule in schedules if schedule.regime is regime]
        assert teams == sorted(teams)
        assert teams[-1] <= cuda_scratch(ranks).teams
    assert schedules[-1].teams == cuda_scratch(ranks).teams
    assert schedules[0].teams == 1
    assert schedules[-1].regime is (Regime.DIRECT if granted else Regime.STAGED)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("teams", [1, 3, 16, 32])
def test_packets_fit_into_their_windows_and_the_lag_into_the_ring(ranks: int, teams: int) -> None:
    inbox = cuda_scratch(ranks)
    scratch = Scratch(teams, inbox.slots, inbox.slot_bytes, inbox.window_bytes, inbox.packet_bytes)
    for name, kind in CALLS.items():
        for size in SIZES:
            schedule = choose(RULES, kind, scratch, largest=size, granted=False, name=name, ranks=ranks)
            assert 1 <= schedule.teams <= teams
            assert schedule.lag < scratch.slots
            if schedule.regime is Regime.PACKET:
                assert size <= schedule.teams * scratch.window_bytes
                assert schedule.lag == 0


def test_copies_go_as_packets_up_to_512_kib_where_the_windows_hold_them() -> None:
    assert chosen(RULES, 2, CUDA_PACKET_BYTES).regime is Regime.PACKET
    assert chosen(RULES, 2, CUDA_PACKET_BYTES + 1).regime is Regime.STAGED
    assert [chosen(RULES, 2, size).teams for size in (1, 4096, 4097, 1 << 17)] == [1, 1, 2, 32]
    assert chosen(RULES, 2, CUDA_PACKET_BYTES + 1, granted=True).teams == 32


@pytest.mark.parametrize(("granted", "bound"), [(False, CUDA_PACKET_BYTES), (True, GRANTED_SUM_PACKET_BYTES)])
def test_an_all_reduce_goes_in_one_exchange_while_all_its_packets_are_few(granted: bool, bound: int) -> None:
    def is_packet(ranks: int, size: int) -> bool:
        return chosen(RULES, ranks, size, name="all_reduce", granted=granted).regime is Regime.PACKET

    most = {ranks: max(size for size in SIZES if is_packet(ranks, size)) for ranks in RANKS}
    assert all((ranks - 1) * size <= bound for ranks, size in most.items())
    assert most[2] == bound


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_role_of_a_team_has_a_block_where_messages_are_large_and_all_find_room(
    name: str, granted: bool, ranks: int
) -> None:
    adds = CALLS[name] is Kind.REDUCE
    for blocks in (0, 1, 32, 63, 64, 132):
        for size in SIZES:
            schedule = chosen(RULES, ranks, size, name=name, granted=granted, blocks=blocks)
            assert replace(schedule, parts=1) == chosen(RULES, ranks, size, name=name, granted=granted)
            bound = DIRECT_PARTS_TEAM_BYTES if schedule.regime is Regime.DIRECT else PARTS_TEAM_BYTES
            large = schedule.regime is not Regime.PACKET and size >= schedule.teams * bound
            roles = 1 if granted and adds else 3 if name == "all_reduce" and ranks > 2 else 2
            assert schedule.parts == (roles if large and roles * schedule.teams <= blocks else 1)
            assert schedule.ctas <= max(blocks, schedule.teams)
    lends = granted and adds  # all lanes of a block add
    assert (chosen(RULES, ranks, SIZES[-1], name=name, granted=granted, blocks=132).parts > 1) != lends


def test_all_reduces_are_joined_but_as_packets_and_through_the_rings_of_two_gpus() -> None:
    exchanges = {
        (tuning.gpu, regime, ranks)
        for tuning in (RULES, Tuning.host())
        for regime in Regime
        for ranks in RANKS
        if how_all_reduce(tuning, regime, ranks) is AllReduce.ONE_SHOT
    }
    packets = {(tuning.gpu, Regime.PACKET, ranks) for tuning in (RULES, Tuning.host()) for ranks in RANKS}
    assert exchanges == packets | {(RULES.gpu, Regime.STAGED, 2)}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("granted", [False, True])
def test_what_stays_at_home_has_a_block_in_copies_through_rings_where_it_is_large_and_all_find_room(
    name: str, granted: bool
) -> None:
    seen = set()
    for blocks in (0, 32, 63, 64, 95, 96, 132):
        for size in SIZES:
            without = chosen(RULES, 2, size, name=name, granted=granted, blocks=blocks)
            for own in (0, 16, size // 2, size, SIZES[-1]):
                schedule = chosen(RULES, 2, size, name=name, granted=granted, blocks=blocks, own=own)
                rings = schedule.regime is Regime.STAGED and CALLS[name] is Kind.COPY
                large = min(size, own) >= schedule.teams * PARTS_TEAM_BYTES
                third = rings and large and 3 * schedule.teams <= blocks
                assert schedule == replace(without, parts=3 if third else without.parts)
                assert schedule.ctas <= max(blocks, schedule.teams)
                seen.add(third)
    assert (True in seen) == (CALLS[name] is Kind.COPY and not granted)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("granted", [False, True])
def test_within_a_budget_no_call_takes_more_blocks(name: str, granted: bool) -> None:
    nothing: Any = None
    site = Site(0, 2, cuda_scratch(2), nothing, nothing, RULES, blocks=132)
    for budget in (1, 3, 8, 16, 64, 500):
        few = site.within(budget)
        for size in SIZES:
            asked: dict[str, Any] = {"largest": size, "granted": granted, "name": name, "ranks": 2, "own": size}
            schedule = choose(RULES, CALLS[name], few.scratch, blocks=few.blocks, **asked)
            assert schedule.ctas <= budget
            if schedule.regime is Regime.PACKET:
                assert size <= schedule.teams * few.scratch.window_bytes
    assert site.within(0) is site
    assert replace(site, tuning=Tuning("")).within(1).scratch == site.scratch  # no GPU


@pytest.mark.parametrize("granted", [False, True])
def test_the_cpu_ignores_names_and_tables(granted: bool) -> None:
    scratch = cpu_scratch(2, teams=3)
    for name, kind in [*CALLS.items(), ("all_reduce", Kind.ALL_REDUCE)]:
        for size in (0, 512, 513, 1 << 20):
            schedule = choose(Tuning.host(), kind, scratch, largest=size, granted=granted, name=name, ranks=2)
            packet = size <= 512 and kind is not Kind.ALL_REDUCE
            assert schedule.regime is (Regime.PACKET if packet else Regime.DIRECT if granted else Regime.STAGED)
            assert schedule.teams == 3
            assert schedule.lag == (4 if schedule.regime is Regime.STAGED else 0)


# ---- tables
def row(**changes: Any) -> dict[str, Any]:
    base = {
        "name": "all_gather",
        "ranks": 2,
        "granted": False,
        "up_to_bytes": 4096,
        "regime": "packet",
        "teams": 4,
        "lag": 0,
    }
    return {**base, **changes}


def table(*rows: Any, **changes: Any) -> dict[str, Any]:
    return {
        "gpu": GPU,
        "date": "2026-01-01",
        "commit": "0" * 12,
        "versions": {"torch": "2.11"},
        "rows": list(rows),
        **changes,
    }


def without(fields: dict[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != field}


def tuning_of(tmp_path: Path, content: Any) -> Tuning:
    path = tmp_path / "test.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_table(path, gpu=GPU)


def test_the_least_loose_row_chooses_and_says_so(tmp_path: Path) -> None:
    rows = [
        row(name="*", ranks="*", granted="*", up_to_bytes="*", regime="staged", teams=9, lag=3),
        row(up_to_bytes="*", regime="staged", teams=5, lag=99),
        row(up_to_bytes=65536, teams=8),
        row(),
        row(granted=True, up_to_bytes="*", regime="direct", teams=6),
    ]
    for order in (rows, rows[::-1]):
        tuning = tuning_of(tmp_path, table(*order))
        assert [chosen(tuning, 2, size).teams for size in (1, 4096, 4097, 65536, 65537)] == [4, 4, 8, 8, 5]
        assert chosen(tuning, 2, 1 << 20).lag == cuda_scratch(2).slots - 1  # what a ring can bear
        assert chosen(tuning, 2, 1, granted=True) == Schedule(
            Regime.DIRECT, 6, 0, "row all_gather, 2 ranks, granted, any size of test.json"
        )
        assert chosen(tuning, 3, 1).teams == chosen(tuning, 2, 1, name="reduce_scatter").teams == 9


def test_a_row_that_a_call_cannot_follow_is_passed_over(tmp_path: Path) -> None:
    tuning = tuning_of(tmp_path, table(row(up_to_bytes="*", teams=1), row(name="*", granted=True, regime="direct")))
    window = cuda_scratch(2).window_bytes
    assert chosen(tuning, 2, window).why.startswith("row")
    assert chosen(tuning, 2, window + 1).why.startswith("rule")
    for name in ("all_to_all", "reduce_scatter"):
        assert chosen(tuning, 2, 1, name=name, granted=True).regime is Regime.DIRECT
        assert chosen(tuning, 2, 1, name=name).why.startswith("rule")


def test_ranks_choose_alike_if_their_digests_are_equal(tmp_path: Path) -> None:
    rows = [row(), row(up_to_bytes="*", regime="staged", lag=4)]
    one, same, other = (tuning_of(tmp_path, table(*r)) for r in (rows, rows[::-1], [row(teams=5), rows[1]]))
    assert one.hash == same.hash
    assert len({one.hash, other.hash, RULES.hash, Tuning.host().hash}) == 4
    assert RULES.hash == Tuning("NVIDIA other").hash
    assert all(chosen(one, 2, size) == chosen(same, 2, size) for size in SIZES)


BAD: list[tuple[Any, str]] = [
    ("{", "JSON"),
    ("[]", "'gpu' is missing"),
    *((without(table(), field), f"'{field}' is missing") for field in ("gpu", "date", "commit", "versions", "rows")),
    (table(gpu="NVIDIA H100"), "NVIDIA H100"),
    (table(rows={}), "`rows` needs to be a list"),
    (table(row(), 7), "row 1 needs"),
    (table({**row(), "speed": 1}), "nothing else"),
    (table(without(row(), "lag")), "row 0 needs"),
    (table(row(name="broadcast")), "`name`"),
    (table(row(ranks=1)), "`ranks`"),
    (table(row(ranks=True)), "`ranks`"),
    (table(row(granted="yes")), "`granted`"),
    (table(row(granted=1)), "`granted`"),
    (table(row(up_to_bytes=-1)), "`up_to_bytes`"),
    (table(row(up_to_bytes=None)), "`up_to_bytes`"),
    (table(row(regime="pigeon")), "`regime`"),
    (table(row(regime=[])), "`regime`"),
    (table(row(name={})), "`name`"),
    (table(row(teams=0)), "`teams`"),
    (table(row(teams=33)), "`teams`"),
    (table(row(teams=2.0)), "`teams`"),
    (table(row(lag=-1)), "`lag`"),
    (table(row(regime="direct")), "`granted` needs to be true"),
]


@pytest.mark.parametrize(("content", "says"), BAD)
def test_a_bad_table_is_refused_by_name(content: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"test\.json") as raised:
        tuning_of(tmp_path, content)
    assert says in str(raised.value)


def test_a_gpu_without_a_table_has_rules() -> None:
    assert Tuning.of_gpu(GPU) == RULES
    assert slug("NVIDIA GeForce RTX 4090 (24 GB)") == "nvidia-geforce-rtx-4090-24-gb"


def test_the_tables_that_come_along_can_be_read() -> None:
    for path in TABLES.glob("*.json"):
        name = json.loads(path.read_text())["gpu"]
        assert path.stem == slug(name)
        assert Tuning.of_gpu(name).rows


def test_every_row_of_the_tables_that_come_along_is_chosen_at_its_bound() -> None:
    kinds = {"reduce_scatter": Kind.REDUCE, "all_reduce": Kind.ALL_REDUCE}
    for path in TABLES.glob("*.json"):
        tuning = Tuning.of_gpu(json.loads(path.read_text())["gpu"])
        for row in tuning.rows:
            assert row.name is not None and row.ranks is not None and row.granted is not None
            scratch, largest = cuda_scratch(row.ranks), row.up_to_bytes or 1 << 30
            kind = kinds.get(row.name, Kind.COPY)
            schedule = choose(
                tuning, kind, scratch, largest=largest, granted=row.granted, name=row.name, ranks=row.ranks
            )
            assert (schedule.regime, schedule.teams) == (row.regime, row.teams), row
            assert str(row) in schedule.why
