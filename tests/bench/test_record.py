"""What is put on record is what was measured, and what is no line of a record is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import benchmarks
import pytest
import torch
from bench import gpu, measure, record, rivals
from bench.cases import (
    COLLECTIVES,
    SHAPES,
    UNEVEN,
    Case,
    collective,
)
from bench.worlds import World

from tests.bench.lines import RUN, line, row_of


def test_lines_come_back_as_they_went(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.jsonl"
    lines = [
        line(),
        line(us=None, busbw_gbps=None, low_us=None, high_us=None, regime=None, ctas=None, why="no GPU"),
        line(us=3),
    ]
    for each in lines:
        record.append(path, [each])
    assert record.read(path) == lines


@pytest.mark.parametrize(
    "changes",
    [
        {"us": None},
        {"us": 0.0},
        {"us": float("nan")},
        {"us": True},
        {"why": "no GPU"},
        {"busbw_gbps": None},
        {"ctas": "8"},
        {"bytes": 1.5},
        {"ranks": True},
        {"hot": 0},
        {"world": "cloud"},
        {"mode": "lazy"},
        {"versions": {"torch": 2}},
        {"provider": None},
    ],
)
def test_a_line_that_means_nothing_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs"):
        line(**changes)
    path = tmp_path / "record.jsonl"
    path.write_text(json.dumps(asdict(line())) + "\n" + json.dumps({**asdict(line()), **changes}) + "\n")
    with pytest.raises(ValueError, match=r"record.jsonl:2: "):
        record.read(path)


@pytest.mark.parametrize("text", ["{", "7", "{}", '{"us": 1}'])
def test_a_text_that_is_no_line_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(ValueError, match=r"record.jsonl:1: "):
        record.read(path)


def test_a_measured_line_is_the_median_and_its_bus_bandwidth(world: World) -> None:
    case = collective("all_reduce", world.ranks, 2400, torch.bfloat16, in_place=True)
    entry = gpu.entries_of(case, world, [])[0]
    rotation = measure.Rotation(4, 2, hot=True)
    times = measure.Times(entry, entry.make(case, world, 2), [3.0, 1.0, 2.0])
    made = measure.line(RUN, world, case, rotation, times, "graph")
    assert (made.us, made.low_us, made.high_us, made.rounds) == (2.0, 1.0, 3.0, 3)
    assert made.busbw_gbps == round(2400 * 2 * (world.ranks - 1) / world.ranks / 2.0 / 1e3, 3)
    assert made.in_place
    assert made.hot
    none = measure.line(RUN, world, case, rotation, measure.Times(entry, None, [], "no GPU"), "graph")
    assert (none.us, none.why) == (None, "no GPU")


def test_what_is_right_has_times_and_what_is_not_says_so(world: World) -> None:
    def lazy(case: Case, world: World, depth: int) -> rivals.Rival:
        return replace(rivals.purlin(case, world, depth, granted=False), provider="lazy", call=lambda rank, turn: None)

    case = collective("all_reduce", world.ranks, 240, torch.float32, in_place=True)
    entries = [*gpu.entries_of(case, world, []), measure.Entry("lazy", lazy)]
    times = measure.measure(case, world, entries, measure.Rotation(4, 2, hot=True), rounds=3, mode="eager")
    ours, granted, *theirs, wrong = times
    assert [each.entry.registered for each in (ours, granted)] == [False, True]
    assert all(len(each.us) == 3 and min(each.us) > 0 for each in (ours, granted))
    assert wrong.why.startswith("wrong result: rank 0")
    assert not wrong.us
    assert {each.entry.provider for each in theirs if each.us} == {"torch_copy", "purlin_copy"}
    assert all("needs a process" in each.why for each in theirs if not each.us)


def test_a_turn_is_put_on_record_and_shown(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.jsonl"
    for size in (2400, 4800):
        case = collective("all_gather", world.ranks, size, torch.bfloat16)
        job = gpu.Job((case,), (), 2, path, "abc")
        assert not gpu._turn(job, world, RUN, case, measure.Rotation(4, 2, hot=True), "eager", first=size == 2400)
    lines = record.read(path)
    assert [line.provider for line in lines if line.us is None] == ["nccl", "nccl_symmetric"]
    assert [line.provider for line in lines if line.bytes == 4800] == ["purlin", "purlin", "torch_copy", "purlin_copy"]
    assert [line.registered for line in lines if line.provider == "purlin"] == [False, True] * 2
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert row_of(benchmarks.text_of(lines), "2400 hot")[0] == "2400 hot"


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_shares_stand_on_record_beside_even_ones(world: World, name: str, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    case = collective(name, world.ranks, 2400, torch.bfloat16)
    job = gpu.Job((case,), (), 2, path, "abc")
    assert not gpu._turn(job, world, RUN, case, measure.Rotation(4, 2, hot=True), "eager", first=True)
    lines = [line for line in record.read(path) if line.provider in rivals.OURS]
    wanted = [(provider, granted) for provider in ("purlin", "purlin_even") for granted in (False, True)]
    assert [(line.provider, line.registered) for line in lines] == wanted
    assert {(line.collective, line.bytes, line.rounds) for line in lines} == {(name, 2400, 2)}
    assert f"### {name}, bfloat16" in benchmarks.text_of(lines)
    assert rivals.purlin_even(case, world, 1, granted=False).case == case.even


def test_an_even_yardstick_that_fails_is_a_failure_of_ours(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object, granted: bool) -> rivals.Rival:
        raise RuntimeError("broken")

    monkeypatch.setattr(rivals, "purlin_even", broken)
    case = collective("all_gather_v", world.ranks, 2400, torch.bfloat16)
    job = gpu.Job((case,), (), 1, None, "abc")
    assert gpu._turn(job, world, RUN, case, measure.Rotation(4, 2, hot=True), "eager", first=True)


def test_uneven_shares_have_sizes_of_their_own_in_the_sweep() -> None:
    for arguments, sizes in (([], gpu.UNEVEN_SIZES), (["--quick"], gpu.UNEVEN_QUICK), (["--bytes", "96"], (96,))):
        found = gpu._job(gpu._parse(arguments), 2).cases
        assert {case.collective for case in found} == {*COLLECTIVES, *UNEVEN, *SHAPES}
        assert [(case.collective, case.bytes) for case in found if case.uneven] == [
            (name, size) for name in UNEVEN for size in sizes
        ]
    chosen = gpu._job(gpu._parse(["--op", "all_to_all_v", "--shape"]), 2).cases
    assert {case.collective for case in chosen} == {"all_to_all_v"}
    assert all(len(set(case.steps[0].shares)) == 2 for case in (*found, *chosen) if case.uneven)


def test_bytes_that_cannot_be_shared_are_refused() -> None:
    for arguments in (["--bytes", "33"], ["--bytes", "28"], ["--bytes", "28", "--op", "all_gather_v"]):
        with pytest.raises(SystemExit, match="bytes"):
            gpu._job(gpu._parse(arguments), 2)
    assert gpu._job(gpu._parse(["--bytes", "28", "--op", "all_gather"]), 2).cases
