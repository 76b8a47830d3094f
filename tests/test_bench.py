"""What scripts/bench, scripts/tune.py and scripts/benchmarks.py say is what was measured: cases against the reference, lines against their
schema, rows of a table against the times they come from, and BENCHMARKS.md against the record."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import benchmarks
import tune
from bench import gpu, measure, record, rivals
from bench.cases import (
    COLLECTIVES,
    FLUX_HEADS,
    FLUX_TOKENS,
    SHAPES,
    UNEVEN,
    Case,
    Step,
    collective,
    expected,
    fits,
    in_shape,
    make,
    out_shape,
    shape,
    values_of,
)
from bench.record import Line, Run
from bench.worlds import Force, World, local_world

from purlin_core.moves import Kind
from purlin_core.plan import Operand, contiguous, freeze_sizes, largest_message
from purlin_core.spec import Spec
from purlin_core.tune import CUDA_PACKET_BYTES, Regime, choose, cuda_scratch, read_table

CPU = torch.device("cpu")
SMALL = Step("b s@ h d -> b s h@ d", (1, 4, 12, 8), 3, strided=True), Step("b s h@ d -> b s@ h d", (1, 12, 4, 8))
RUN = Run("run1", "2026-01-01T00:00:00+00:00", "abc", "Linux", "1 x NVIDIA Test", {"torch": "2.11"})


def cases(ranks: int) -> list[Case]:
    places = [(name, in_place) for name in (*COLLECTIVES, *UNEVEN) for in_place in gpu.IN_PLACE[name]]
    found = [collective(name, ranks, 240, torch.bfloat16, in_place=in_place) for name, in_place in places]
    return [*found, Case("flux1024_qkv_o_small", ranks, 1, torch.float32, SMALL)]


@pytest.fixture(params=[2, 3])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = local_world(request.param, ["cpu"], heap_bytes=1 << 20)
    yield made
    made.shut()


# ---- cases and rivals
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_must_come_of_a_case_is_what_its_spec_means(ranks: int) -> None:
    for case in cases(ranks):
        for index, step in enumerate(case.steps):
            if any(size % ranks for size in step.shape[1:3]):
                continue
            inputs = [values_of(case, index, rank, 5, CPU)[0] for rank in range(ranks)]
            wanted = Spec.parse(step.spec).reference(inputs, sizes=step.sizes)
            for rank in range(ranks):
                out = expected(step, inputs, rank)
                assert torch.equal(out, wanted[rank])
                assert tuple(out.shape) == out_shape(step, ranks, rank=rank)


def test_ours_is_right_on_every_case_and_a_wrong_byte_is_seen(world: World) -> None:
    for case in cases(world.ranks):
        for granted in (False, True):
            rival = rivals.purlin(case, world, 3, granted=granted)
            measure.check(world, rival)
            outs = rival.sets[1][0][-1][1]
            outs[-1].view(-1)[-1] += 1
            assert rival.wrong(0) == ""
            assert rival.wrong(1).startswith("rank 0, call 1")
            outs[-1].fill_(float("nan"))
            assert rival.wrong(1)


def test_yardsticks_run_where_all_ranks_share_a_device(world: World) -> None:
    for case in cases(world.ranks):
        for make_one in (rivals.torch_copy, rivals.purlin_copy):
            measure.check(world, make_one(case, world, 2))
    measure.check(world, rivals.torch_relayout(cases(world.ranks)[-1], world, 2))


def test_a_rival_that_does_nothing_is_wrong(world: World) -> None:
    case = cases(world.ranks)[0]
    rival = rivals.purlin(case, world, 1, granted=False)
    rival.call = lambda rank, turn: None
    with pytest.raises(measure.WrongError):
        measure.check(world, rival)


def test_tensors_in_place_are_parts_of_each_other() -> None:
    empty = lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype)  # noqa: E731
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        (((x,), (out,)),) = make(collective(name, 2, 64, torch.float32, in_place=True), 1, empty, empty)
        small, large = (x, out) if name == "all_gather" else (out, x)
        offset = 0 if name == "all_reduce" else large.nbytes // 2
        assert small.data_ptr() == large.data_ptr() + offset
    with pytest.raises(ValueError, match="all_to_all"):
        make(collective("all_to_all", 2, 64, torch.float32, in_place=True), 1, empty, empty)


def test_bytes_and_bus_bandwidth_are_those_of_nccl_tests() -> None:
    factors = {"all_gather": 3 / 4, "reduce_scatter": 3 / 4, "all_reduce": 3 / 2, "all_to_all": 3 / 4}
    for name, factor in factors.items():
        case = collective(name, 4, 4096, torch.bfloat16)
        whole = out_shape(case.steps[0], 4, rank=0) if name == "all_gather" else case.steps[0].shape
        assert torch.Size(whole).numel() * 2 == 4096
        assert case.busbw_bytes == 4096 * factor


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", UNEVEN)
def test_the_largest_message_of_uneven_shares_is_that_of_the_even_case_of_their_bytes(name: str, ranks: int) -> None:
    case = collective(name, ranks, 240 * ranks, torch.bfloat16)
    even = collective(name.removesuffix("_v"), ranks, 240 * ranks, torch.bfloat16)
    assert case.even == even
    for rank in range(ranks):
        assert [largest_message([operand(each, rank)], rank, ranks) for each in (case, even)] == [240, 240]
    assert (case.bytes, case.busbw_bytes) == (even.bytes, even.busbw_bytes)
    copied, even_copied = ([each.copied_bytes(rank) for rank in range(ranks)] for each in (case, even))
    assert sum(copied) < sum(even_copied)
    assert all(ours <= theirs for ours, theirs in zip(copied, even_copied, strict=True))


def operand(case: Case, rank: int) -> Operand:
    (step,) = case.steps
    shape, out = (of(step, case.ranks, rank=rank) for of in (in_shape, out_shape))
    spec, sizes = Spec.parse(step.spec), freeze_sizes(step.sizes)
    return Operand(spec, shape, contiguous(shape), contiguous(out), case.dtype.itemsize, "bfloat16", sizes)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_flux_moves_the_bytes_that_it_has(ranks: int) -> None:
    tensor = FLUX_TOKENS * FLUX_HEADS * 128 * 2
    bytes_of = {name: shape(name, ranks).bytes for name in SHAPES}
    assert bytes_of == {
        "flux1024_qkv_o": 4 * tensor // ranks,
        "flux1024_qkv_o_strided": 4 * tensor // ranks,
        "flux1024_kv": 2 * tensor,
        "flux1024_kv_strided": 2 * tensor,
    }
    assert shape("flux1024_qkv_o", ranks).busbw_bytes == 4 * tensor * (ranks - 1) / ranks**2
    assert fits("flux1024_kv", ranks)
    assert not fits("flux1024_kv", 5)


@pytest.mark.parametrize("name", ["all_gather", "all_gather_v"])
def test_buffers_rotate_beyond_the_cache_or_stay_within_it(world: World, name: str) -> None:
    l2_bytes = 60 << 20
    for size in (1 << k for k in range(10, 29)):
        unit = 2 * world.ranks
        case = collective(name, world.ranks, size // unit * unit, torch.bfloat16)
        found = measure.rotations(case, world, l2_bytes)
        assert found
        for rotation in found:
            turned = rotation.depth * case.touched_bytes * world.ranks
            assert turned <= l2_bytes // 2 if rotation.hot else turned >= 1.5 * l2_bytes
            assert rotation.calls % rotation.depth == 0
            assert rotation.calls >= rotation.depth <= measure.MOST_SETS
            granted = rotation.depth * (case.touched_bytes + 8192) * (1 + case.uneven)
            assert granted <= gpu.room_bytes([case], world.ranks)


def test_what_cannot_run_says_why(world: World) -> None:
    case = collective("all_reduce", world.ranks, 240, torch.bfloat16, in_place=True)
    for entry in gpu.entries_of(case, world, []):
        if entry.provider in benchmarks.RIVALS:
            with pytest.raises(rivals.UnavailableError, match="needs a process"):
                entry.make(case, world, 1)
    with pytest.raises(rivals.UnavailableError, match="no relayout"):
        rivals.torch_relayout(case, world, 1)


def test_shares_that_nccl_has_no_call_for_say_so_and_even_ones_have_no_even_ones_beside_them(world: World) -> None:
    apart = replace(world, name="processes")
    for name in ("all_gather_v", "reduce_scatter_v"):
        for make_one in (rivals.nccl, rivals.nccl_symmetric):
            with pytest.raises(rivals.UnavailableError, match="equal shares only"):
                make_one(collective(name, world.ranks, 240, torch.bfloat16), apart, 1)
    with pytest.raises(rivals.UnavailableError, match="shares are equal"):
        rivals.purlin_even(collective("all_gather", world.ranks, 240, torch.bfloat16), world, 1, granted=False)


@pytest.mark.parametrize("name", ["all_to_all", "all_to_all_v"])
def test_nccl_gets_an_all_to_all_cut_as_it_must_be(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rivals.dist, "all_to_all_single", lambda *given: calls.append(given))
    rival = rivals.nccl(collective(name, world.ranks, 240, torch.bfloat16), replace(world, name="processes"), 1)
    rival.fill(0)
    for rank in world.here:
        rival.call(rank, 0)
    for rank, (out, _, *cuts) in enumerate(calls):
        pieces = [x.split(*gives[1:] or (1,))[rank] for _, x, *gives in calls]
        assert not cuts or [len(piece) for piece in pieces] == cuts[0]
        out.copy_(torch.cat(pieces))
    assert rival.wrong(0) == ""


def test_relayouts_are_those_that_an_all_to_all_needs() -> None:
    x = torch.arange(2 * 6 * 4).view(1, 2, 6, 4)
    sent = rivals.to_heads(x, 3)
    assert sent.is_contiguous()
    assert all(torch.equal(sent[rank], x[0, :, 2 * rank : 2 * rank + 2]) for rank in range(3))


@pytest.mark.parametrize("text", ["direct", "direct:0", "pigeon:8", "staged:x", ""])
def test_what_cannot_be_forced_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="REGIME:CTAS"):
        Force.parse(text)


@pytest.mark.parametrize("regime", Regime)
def test_a_forced_call_goes_as_it_must(regime: Regime) -> None:
    force = Force(regime, 8, strict=True)
    assert Force.parse(str(force)) == force
    tuning = force.tuning("NVIDIA Test", 8)
    for size in (1, 8192):
        schedule = choose(tuning, Kind.COPY, cuda_scratch(2), largest=size, granted=force.granted, name="halo", ranks=2)
        assert (schedule.regime, schedule.teams) == (regime, 8)


# ---- the table that tune.py writes
@pytest.mark.parametrize("ranks", [2, 6, 8, 16])
def test_only_what_can_run_is_tried(ranks: int) -> None:
    for largest in (1, 512, 1 << 14, 1 << 18, 1 << 19, 1 << 26):
        tried = tune.candidates(largest, ranks)
        assert len(set(tried)) == len(tried) > 0
        for force in tried:
            tuning = force.tuning("NVIDIA Test", cuda_scratch(ranks).slots)
            schedule = choose(
                tuning,
                Kind.COPY,
                cuda_scratch(ranks),
                largest=largest,
                granted=force.granted,
                name="all_gather",
                ranks=ranks,
            )
            assert (schedule.regime, schedule.teams) == (force.regime, force.teams)
        window = min(CUDA_PACKET_BYTES, cuda_scratch(ranks).teams * cuda_scratch(ranks).window_bytes)
        assert any(force.regime is Regime.PACKET for force in tried) == (largest <= window)


def test_the_fewest_teams_of_a_tie_win() -> None:
    times = {Force(Regime.STAGED, 32): 10.0, Force(Regime.STAGED, 16): 10.1, Force(Regime.PACKET, 4): 10.3}
    assert tune.winner(times) == Force(Regime.STAGED, 16)


def test_a_written_table_chooses_what_was_fastest_at_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "versions", lambda: {"torch": "2.11"})
    path, name = tmp_path / "deep" / "nvidia-test.json", "NVIDIA Test"
    best = [
        (1024, Force(Regime.PACKET, 1)),
        (4096, Force(Regime.PACKET, 1)),
        (16384, Force(Regime.PACKET, 8)),
        (1 << 20, Force(Regime.STAGED, 32)),
    ]
    for ranks in (2, 4):
        tune.write(path, name, tune.merged("all_gather", ranks, False, best), "abc")
    tuning = read_table(path, gpu=name)
    assert len(tuning.rows) == 6
    assert json.loads(path.read_text())["commit"] == "abc"
    for ranks in (2, 4):
        for size, force in [
            *best,
            (1 << 28, best[-1][1]),
            (1, best[0][1]),
            (5000, best[0][1]),
            (8193, best[2][1]),
        ]:
            schedule = choose(
                tuning, Kind.COPY, cuda_scratch(ranks), largest=size, granted=False, name="all_gather", ranks=ranks
            )
            assert (schedule.regime, schedule.teams) == (force.regime, force.teams)
            assert "row all_gather" in schedule.why


# ---- lines on record
def line(**changes: Any) -> Line:
    fields: dict[str, Any] = {
        **asdict(RUN),
        "provider": "purlin",
        "world": "local",
        "collective": "all_gather",
        "bytes": 1024,
        "dtype": "bfloat16",
        "ranks": 2,
        "in_place": False,
        "regime": "packet",
        "ctas": 1,
        "forced": False,
        "registered": False,
        "hot": False,
        "mode": "graph",
        "us": 2.5,
        "low_us": 2.4,
        "high_us": 2.6,
        "rounds": 5,
        "busbw_gbps": 0.2,
        "why": "",
    }
    return Line(**{**fields, **changes})


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


# ---- BENCHMARKS.md
def test_the_committed_text_is_what_the_record_gives() -> None:
    text = benchmarks.text_of(benchmarks.on_record(), benchmarks.pictures_on_record())
    assert benchmarks.TARGET.read_text() == text
    assert benchmarks.main(["--check"]) == 0


def several() -> list[Line]:
    make_one: Callable[..., Line] = lambda **changes: line(world="processes", gpus="2 x NVIDIA Test", **changes)  # noqa: E731
    return [
        make_one(us=4.0),
        make_one(us=2.0, registered=True, regime="direct"),
        make_one(us=6.0, provider="nccl"),
        make_one(us=5.0, provider="nccl_symmetric", registered=True),
        make_one(us=3.0, in_place=True),
        make_one(us=1.5, provider="nccl", in_place=True),
        make_one(us=99.0, hot=True),
        make_one(us=8.0, bytes=1 << 20),
        make_one(
            us=None, busbw_gbps=None, low_us=None, high_us=None, provider="torch_symm_mem", why="all-reduces only"
        ),
    ]


def row_of(text: str, start: str) -> list[str]:
    (found,) = [row for row in text.splitlines() if row.startswith(f"| {start} ")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_rows_hold_every_rival_and_the_ratio_to_the_best() -> None:
    text = benchmarks.text_of(several())
    assert row_of(text, "bytes") == [
        "bytes",
        "purlin",
        "purlin, granted",
        "nccl",
        "nccl_symmetric",
        "purlin, in place",
        "nccl, in place",
        "best rival / ours",
        "best rival / ours, in place",
        "GB/s",
    ]
    wanted = ["1024", "4.00 packet 1", "2.00 direct 1", "6.00", "5.00", "3.00 packet 1", "1.50", "2.50", "0.50", "0.2"]
    assert row_of(text, "1024") == wanted
    assert row_of(text, "1048576") == ["1048576", "8.00 packet 1", *["not run"] * 7, "0.2"]
    assert "- torch_symm_mem: all-reduces only" in text
    assert "99" not in text
    assert text.count("### reduce_scatter\n\nnot run") == 1
    assert "## One GPU\n\nnot run" in text


def test_a_row_of_uneven_shares_holds_the_ratio_to_even_ones() -> None:
    v = partial(line, collective="all_gather_v")
    lines = [
        v(us=4.0),
        v(us=2.0, registered=True, regime="direct"),
        v(us=3.9, provider="purlin_even"),
        v(us=2.5, provider="purlin_even", registered=True, regime="direct"),
        v(us=5.0, provider="torch_copy", regime=None, ctas=None),
        v(us=8.0, bytes=2048),
    ]
    text = benchmarks.text_of(lines)
    assert row_of(text, "bytes")[1:5] == ["purlin", "purlin, granted", "purlin_even", "purlin_even, granted"]
    assert row_of(text, "bytes")[-3:] == ["ours / even", "ours / even, granted", "GB/s"]
    assert row_of(text, "1024")[3:5] == ["3.90 packet 1", "2.50 direct 1"]
    assert row_of(text, "1024")[-3:] == ["1.03", "0.80", "0.2"]
    assert row_of(text, "2048")[-3:] == ["not run", "not run", "0.2"]


def test_the_newest_run_of_a_machine_kind_counts() -> None:
    old = several()
    newer = [replace(each, date="2026-02-01T00:00:00+00:00", run="run2", us=7.5) for each in old[:1]]
    other = [replace(each, gpus="8 x NVIDIA Other", us=123.0) for each in old[:1]]
    text = benchmarks.text_of([*newer, *old, *other])
    assert row_of(text.split("## 8 x")[0], "1024") == ["1024", "7.50 packet 1", "not run", "0.2"]
    assert "123.00" in text


def test_the_order_of_lines_does_not_matter() -> None:
    lines = [
        *several(),
        line(forced=True, us=4.25),
        line(),
        line(us=2.0, provider="torch_copy", regime=None, ctas=None),
        line(mode="eager"),
    ]
    text = benchmarks.text_of(lines)
    assert text == benchmarks.text_of(lines[::-1])
    assert "| 1024 |  | packet | 1 | 4.25 | 0.2 |" in text
    assert "ours / torch's copy" in text
    assert "| 1.25 |" in text
    assert "called from Python" in text


def test_without_a_gpu_the_scripts_say_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for program in (gpu.main, tune.main):
        with pytest.raises(SystemExit, match="needs a GPU"):
            program([])
