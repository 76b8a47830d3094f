"""latency and compare: every mode is a row with figures or a reason, one rank is the reference, and what is written is what was measured."""

from __future__ import annotations

import argparse
import base64
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import benchmarks

from purlin_core.errors import StallError
from purlin_diffusion import opening
from purlin_diffusion.__main__ import main
from purlin_diffusion.commands import compare, latency, picture
from purlin_diffusion.commands.exits import FAILED, INTERRUPTED, WRONG_INPUT, InputError
from purlin_diffusion.commands.options import Options
from purlin_diffusion.commands.picture import CLOCK, Seconds
from purlin_diffusion.commands.timing import (
    handmade,
    memory,
    opened,
    page,
    profile,
    rank,
    record,
    rows,
    table,
    watch,
)
from purlin_diffusion.commands.timing import modes as timing_modes
from purlin_diffusion.commands.timing import truth as truth_of
from purlin_diffusion.commands.timing.likeness import Likeness
from purlin_diffusion.commands.timing.modes import HOWS, Asked, Mode, cannot, modes
from purlin_diffusion.commands.timing.profile import EXCHANGE, STEP, Event
from purlin_diffusion.commands.timing.rows import Result
from purlin_diffusion.commands.timing.steps import Outputs
from purlin_diffusion.commands.timing.truth import Error, Truth
from purlin_diffusion.commands.timing.visit import Visit
from purlin_diffusion.graph.policy import Graphs
from tests.diffusion.echo import EchoPool

TINY = ("--device", "cpu", "--model", "tiny:flux", "--steps", "2", "--seed", "3", "--height", "48", "--width", "64")
NAMES = ("1 rank", "accelerate device_map", "accelerate split prompts", "diffusers ulysses", "diffusers ring")
OURS = ("ours over torch", "ours")
ASKED = Asked(repeats=1, warmup=1, hows=("eager",))


def read_all(*arguments: str) -> tuple[list[Options], Asked]:
    parser = argparse.ArgumentParser()
    latency.add_arguments(parser)
    return latency.read(parser.parse_args(list(arguments)))


def read(*arguments: str) -> tuple[Options, Asked]:
    (options,), asked = read_all(*arguments)
    return options, asked


def timed(options: Options, asked: Asked = ASKED) -> Result:
    (result,) = latency.timed([options], asked, lambda _: None)
    return result


def measured(*arguments: str) -> Result:
    return timed(read(*TINY, *arguments)[0])


def by_mode(result: Result, how: str = "eager") -> dict[str, rows.Row]:
    return {row.mode.name: row for row in result.rows if row.mode.how == how}


@pytest.fixture(scope="module")
def two() -> Result:
    return measured("--ranks", "2", "--threads")


# ---- the whole of it
@pytest.mark.timeout(300)
def test_digits_on_two_processes_from_the_command_to_the_page(tmp_path: Path) -> None:
    files = {name: tmp_path / "deep" / f"run.{name}" for name in ("json", "record", "html")}
    call = [sys.executable, "-m", "purlin_diffusion", "latency", "--device", "cpu", "--ranks", "2", "--steps", "2"]
    call += ["--repeats", "1", *(word for name, file in files.items() for word in (f"--{name}", str(file)))]
    done = subprocess.run(call, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in files["record"].read_text().splitlines()]
    ran = {line["mode"] for line in lines if not line["why"]}
    assert {"accelerate split prompts", *OURS} < ran
    assert len({(line["mode"], line["graph"], line["compile"]) for line in lines}) == len(lines)
    for line in lines:
        assert (line["ms_per_step"] is None) == (line["total_s"] is None) == bool(line["why"])
    for line in (line for line in lines if line["mode"] in OURS and not line["why"]):
        assert line["max_abs"] <= 1e-5 and line["exchange_ms_per_step"] > 0
    written = json.loads(files["json"].read_text())
    assert [len(of_rank) for of_rank in written["visits_by_rank"]] == [len(written["visits_by_rank"][0])] * 2
    html = files["html"].read_text()
    for name in (*NAMES, *OURS):
        assert f"<td>{name}" in html and f"| {name}" in done.stdout
    assert "repeat 1 of 1: ours, eager" in done.stderr
    assert benchmarks.pictures_on_record(files["record"]) == lines


# ---- rows
def test_every_mode_has_a_row_with_figures_or_a_reason(two: Result) -> None:
    assert [row.mode for row in two.rows] == modes(two.options, two.asked)
    for row in two.rows:
        assert (row.whole_s is None) == bool(row.cannot)
        if row.whole_s:
            assert 0 < row.whole_s.least <= row.whole_s.median <= row.whole_s.most
    assert all(row.cannot for row in two.rows if row.mode.how != "eager")
    assert all(by_mode(two)[name].whole_s for name in OURS)


def test_ours_draws_the_picture_of_one_rank(two: Result) -> None:
    alone, *others = [row for row in two.measured if row.likeness or row.mode.kind == "alone"]
    assert alone.likeness is None  # it is the reference
    assert {row.mode.name for row in others} >= set(OURS)
    assert all(row.likeness and row.likeness.max_abs <= 1e-5 for row in others)


def test_another_image_is_seen_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the difference."""
    draw, seeds = rank.call, iter(range(100))

    def other_seed(pipe: Any, arguments: dict[str, Any], *, seed: int, output: str) -> Any:
        return draw(pipe, arguments, seed=next(seeds), output=output)

    monkeypatch.setattr(rank, "call", other_seed)
    likenesses = [row.likeness for row in measured("--ranks", "2", "--threads").measured if row.likeness]
    assert len(likenesses) >= 2
    assert min(each.max_abs for each in likenesses) > 1e-2
    assert all(each.psnr_db is not None and each.psnr_db < 60 for each in likenesses)


def test_a_mode_that_cannot_run_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = opened.parallelized

    def no_torch(pipe: Any, options: Options, mode: Mode) -> Any:
        if mode.backend == "torch":
            raise StallError("no gloo here")
        return ours(pipe, options, mode)

    monkeypatch.setattr(opened, "parallelized", no_torch)
    result = measured("--ranks", "2", "--threads")
    assert [by_mode(result)[name].cannot for name in OURS] == ["no gloo here", ""]
    assert "no gloo here (ours over torch: eager)" in table.text(result)


def test_a_defect_of_ours_is_told_as_one_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError("a typo")

    monkeypatch.setattr(opened, "parallelized", broken)
    parser = argparse.ArgumentParser()
    latency.add_arguments(parser)
    call = [*TINY, "--ranks", "2", "--threads", "--repeats", "1", "--how", "eager"]
    assert latency.run(parser.parse_args(call)) == FAILED
    told = capsys.readouterr()
    assert "a defect of purlin_diffusion: AttributeError: a typo (ours over torch, ours: eager" in told.out
    assert "in broken" in told.err  # a traceback


def test_a_mode_that_fails_once_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def spent(_pipe: Any, _options: Options, mode: Mode) -> Any:
        tries.append(mode.title)
        raise StallError("it stalls")

    monkeypatch.setattr(opened, "parallelized", spent)
    options, _ = read(*TINY, "--ranks", "2", "--threads")
    timed(options, replace(ASKED, repeats=3))
    assert sorted(tries) == sorted(f"{name}, eager" for name in OURS)


def test_one_rank_alone_says_what_it_lacks() -> None:
    options, asked = read(*TINY)
    result = timed(options, replace(asked, repeats=1))
    assert [row.mode.kind for row in result.measured] == ["alone"]
    assert "needs 2 ranks" in by_mode(result)["diffusers ring"].cannot
    assert "graphs" in by_mode(result)["ours"].cannot


def test_a_copy_shares_its_weights_and_leaves_the_pipeline_alone() -> None:
    from purlin_diffusion.pipelines import load

    pipe = load("tiny:flux")
    copy = opened.sharing_weights(pipe)
    for name in ("transformer", "vae"):
        other, own = getattr(copy, name), getattr(pipe, name)
        assert other is not own
        assert {id(x) for x in other.parameters()} == {id(x) for x in own.parameters()}
    assert copy.text_encoder is pipe.text_encoder


def test_blocks_are_compiled_and_the_whole_where_diffusers_names_none() -> None:
    calls: list[str] = []

    def none_named() -> None:
        raise ValueError("no `_repeated_blocks`")

    opened.compile_blocks(lambda: calls.append("blocks"), otherwise=lambda: calls.append("whole"))
    opened.compile_blocks(none_named, otherwise=lambda: calls.append("whole"))
    assert calls == ["blocks", "whole"]


def out_of_memory(*_: Any, **__: Any) -> Any:
    import torch

    raise torch.OutOfMemoryError("no room")


def refused(*_: Any, **__: Any) -> Any:
    raise InputError("no such attention")  # as diffusers' ring says, which wants a log-sum-exp


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (out_of_memory, "OutOfMemoryError: no room"),
        (refused, "a defect of purlin_diffusion: InputError: no such attention"),
    ],
)
def test_what_one_mode_cannot_do_is_a_row_and_the_next_mode_runs(
    fails: Callable[[], Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = rank.Rank.draw

    def short_of_it(self: Any, mode: Mode, ready: Any, **how: Any) -> Any:
        return fails() if mode.backend == "torch" else draw(self, mode, ready, **how)

    monkeypatch.setattr(rank.Rank, "draw", short_of_it)
    result = measured("--ranks", "2", "--threads")
    assert [by_mode(result)[name].cannot for name in OURS] == [told, ""]


def test_what_cannot_be_watched_keeps_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "profiled", out_of_memory)
    result = measured("--ranks", "2", "--threads")
    ours = by_mode(result)["ours"]
    assert ours.whole_s and ours.note == "OutOfMemoryError: no room" and not ours.cannot
    assert "ours, eager could not be watched: OutOfMemoryError: no room" in table.text(result)


@pytest.mark.parametrize("ended", [KeyboardInterrupt, SystemExit])
def test_a_run_that_ends_early_tells_what_it_has(
    ended: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opens = opened.parallelized

    def interrupted(pipe: Any, options: Options, mode: Mode) -> Any:
        if mode.name == "ours":
            raise ended
        return opens(pipe, options, mode)

    monkeypatch.setattr(opened, "parallelized", interrupted)
    options, _ = read(*TINY, "--ranks", "2", "--threads")
    told: list[Result] = []
    with pytest.raises(ended):
        latency.timed([options], ASKED, told.extend)
    (result,) = told
    found = by_mode(result)
    assert found["ours over torch"].whole_s and found["ours"].cannot == rows.NOT_REACHED
    assert any(line["why"] == rows.NOT_REACHED for line in record.lines(result))


def test_ctrl_c_leaves_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    call = [sys.executable, "-m", "purlin_diffusion", "latency", *TINY, "--ranks", "2", "--repeats", "1000"]
    with subprocess.Popen([*call, "--record", str(file)], stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "repeat 2 of 1000: ours" in line:
                break
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == INTERRUPTED
    every = [json.loads(line) for line in file.read_text().splitlines()]
    lines = {(line["mode"], line["graph"], line["compile"]): line for line in every}
    assert lines["ours", False, False]["total_s"] > 0


def test_sizes_are_timed_one_after_the_other(tmp_path: Path) -> None:
    sizes, asked = read_all("--device", "cpu", "--model", "tiny:flux", "--size", "48x64", "64", "--modes", "ours")
    small, large = latency.timed(sizes, replace(asked, repeats=1, hows=("eager",)), lambda _: None)
    assert [record.lines(each)[0]["size"] for each in (small, large)] == ["48x64", "64x64"]
    html = page.page(small, large)
    assert html.count("<h2>The same picture</h2>") == 2


def test_only_who_is_asked_for_runs_and_one_rank_always() -> None:
    options, asked = read(*TINY, "--ranks", "2", "--modes", "ours")
    why = {mode.who: cannot(mode, options, asked) for mode in modes(options, asked) if mode.how == "eager"}
    assert why["alone"] == why["ours"] == ""
    assert why["torch"] == "not asked for: --modes torch" and why["split"] == "not asked for: --modes split"


def test_each_attention_is_a_row() -> None:
    options, asked = read(*TINY, "--ranks", "2", "--attention", "gather_kv,ulysses")
    names = {mode.name: mode.attention for mode in modes(options, asked) if mode.who == "ours"}
    assert names == {"ours gather_kv": "gather_kv", "ours ulysses": "ulysses"}


# ---- graphs, of which echoes run on a CPU
@pytest.fixture
def echoes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "Graphs", lambda config: Graphs(config, EchoPool))
    monkeypatch.setattr(timing_modes, "how_cannot", lambda *_: "")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("echoes")
def test_graphs_are_timed_as_replays(ranks: int) -> None:
    """Of one rank and of two; eagerly there are none."""
    options, _ = read(*TINY, "--steps", "3", "--threads", "--ranks", str(ranks))
    result = timed(options, replace(ASKED, hows=("eager", "graph"), who=("alone", "ours"), truth=True))
    graph = [row for row in result.measured if row.mode.graph]
    assert {row.mode.who for row in graph} == ({"alone", "ours"} if ranks > 1 else {"alone"})
    for row in graph:
        assert row.graphs is not None and row.graphs.captures == 1
        assert row.graphs.replays == 3 * 3 - 1  # steps of three calls, but for the first
        assert row.likeness is not None and row.likeness.max_abs <= 1e-5
    for row in (row for row in result.measured if not row.mode.graph):
        assert row.graphs is None or row.graphs.captures == 0


@pytest.mark.usefixtures("echoes")
def test_one_rank_has_graphs_where_ranks_are_processes_too() -> None:
    """It is alone there, and asks no other."""
    from purlin_diffusion.pipelines import load

    options, _ = read(*TINY, "--ranks", "2", "--processes")
    pipe = load("tiny:flux")
    with opened.parallelized(pipe, options, Mode("1 rank", "alone", "none", "graph")) as handle:
        for _ in range(2):
            picture.call(pipe, picture.call_arguments(options), seed=0, output="pt")
        counts = handle.counters[0].graphs
        assert (handle.ranks, counts.captures, counts.replays) == (1, 1, 3)
        assert handle.decoding.counts().captures == 1
    assert "decode" not in vars(pipe.vae)


def test_a_graph_by_hand_runs_records_and_replays_and_leaves_the_model_as_it_was() -> None:
    import torch
    from purlin_diffusion.pipelines import load

    model = load("tiny:flux").transformer
    drawn = torch.Generator().manual_seed(0)
    calls = [
        {
            "hidden_states": torch.randn(1, 6, 64, generator=drawn),
            "encoder_hidden_states": torch.randn(1, 5, 32, generator=drawn),
            "pooled_projections": torch.randn(1, 32, generator=drawn),
            "timestep": torch.full((1,), time),
            "guidance": torch.full((1,), 3.5),
            "img_ids": torch.zeros(6, 3),
            "txt_ids": torch.zeros(5, 3),
            "return_dict": False,
        }
        for time in (1.0, 0.5, 0.25)
    ]
    with torch.no_grad():
        wanted = [model(**each)[0] for each in calls]
        before = dict(vars(model))
        with handmade.graphed(model, EchoPool) as made:
            got = [model(**each)[0] for each in calls]
        assert (made.replays, made.captures) == (2, 0)  # given back
    assert all(torch.equal(mine, one) for mine, one in zip(got, wanted, strict=True))
    assert vars(model) == before


# ---- the truth
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_ours_is_as_near_to_float32_as_one_rank_is(family: str) -> None:
    options, _ = read(*TINY, "--model", f"tiny:{family}", "--dtype", "bfloat16", "--ranks", "2", "--threads")
    result = timed(options, replace(ASKED, truth=True, attentions=("gather_kv", "ulysses"), who=("alone", "ours")))
    ours = [row for row in result.measured if row.mode.kind == "ours"]
    assert len(ours) == 2
    for row in result.measured:
        assert row.error is not None and 1e-3 < row.error.call < 0.05  # what bfloat16 costs, and no more
        assert row.true is True, row.over_one
    assert "error / 1 rank" in table.text(result) and " !" not in table.markdown(table.TRUTH, table.truths(result))


def test_a_mode_further_from_the_truth_than_rounding_is_marked() -> None:
    import torch

    one, far = Error(0.01, 0.02), Error(0.0121, 0.02)
    assert far.over(one) == (pytest.approx(1.21), 1.0)
    assert rows.Row(PURLIN, over_one=far.over(one)).true is False
    marked = rows.Row(PURLIN, whole_s=rows.Spread(1, 1, 1), error=far, over_one=far.over(one))
    options, asked = read(*TINY, "--ranks", "2")
    result = Result(options, asked, (marked,), ())
    assert "1.21x !" in table.text(result) and "1.21x !" in page.page(result)
    assert "Further from float32 than rounding explains: ours, eager." in compare.screen(result)
    truth = torch.ones(4)
    outputs = Outputs(first=truth * 1.5, last=truth)
    assert Error.of(outputs, Truth(truth, truth)) == Error(0.5, 0.0)
    assert Error(0.0, 0.0).over(Error(0.0, 0.0)) is None  # one rank in float32 is the truth


def test_the_weights_in_float32_are_the_same_and_the_pipeline_is_left_alone() -> None:
    import torch
    from purlin_diffusion.pipelines import load

    pipe = load("tiny:flux", dtype=torch.bfloat16)
    exact = truth_of.in_float32(pipe)
    for mine, wide in zip(pipe.transformer.parameters(), exact.transformer.parameters(), strict=True):
        assert (mine.dtype, wide.dtype) == (torch.bfloat16, torch.float32) and torch.equal(mine.float(), wide)
    assert "encode_prompt" not in vars(pipe)


# ---- figures
ALONE_1, ALONE_2 = (Mode(f"1 rank ({n})", "alone", "none", "eager", threads=n) for n in (1, 2))
PURLIN, SPLIT = Mode("ours", "ours", "purlin", "eager", 2), Mode("split", "split", "accelerate", "eager", 2)


def of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(rows, "modes", lambda *_: [ALONE_1, ALONE_2, SPLIT, PURLIN])

    def visits(whole: float, *, root: bool) -> list[Visit]:
        first = [Visit(ALONE_1, Seconds(4.0, (2.0,))), Visit(ALONE_2, Seconds(3.0, (1.0,)))]
        idle = [Visit(ALONE_1), Visit(ALONE_2)]
        likeness = Likeness(0.5, 6.0) if root else None
        ours = Visit(PURLIN, Seconds(whole, (whole / 2,)), memory_gb=whole, likeness=likeness)
        return [*(first if root else idle), Visit(SPLIT, Seconds(whole * 4, ()), images=2), ours]

    options, asked = read(*TINY, "--ranks", "2")
    return rows.summarize(options, asked, [visits(1.0, root=True), visits(1.5, root=False)])


def test_a_time_is_that_of_the_slowest_rank_and_the_rival_is_the_best_of_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = of_two_ranks(monkeypatch)
    assert [row.whole_s.median for row in result.measured if row.whole_s] == [4.0, 3.0, 6.0, 1.5]
    assert [row.step_s.median if row.step_s else None for row in result.rows] == [2.0, 1.0, None, 0.75]
    assert [row.speedup for row in result.rows] == [0.75, 1.0, 0.5, 2.0]
    assert [row.images_per_s for row in result.rows] == [1 / 4, 1 / 3, 2 / 6, 1 / 1.5]
    assert result.rows[-1].memory_gb == 1.5
    assert result.rows[-1].likeness == Likeness(0.5, 6.0)


def test_likeness_is_the_largest_difference_and_the_noise() -> None:
    black, grey = np.zeros((4, 4, 3), np.float32), np.full((4, 4, 3), 0.1, np.float32)
    assert Likeness.of(black, black) == Likeness(0.0, None)
    apart = Likeness.of(grey, black)
    assert apart.max_abs == pytest.approx(0.1)
    assert apart.psnr_db == pytest.approx(20.0, abs=1e-4)


def test_exchanges_are_counted_once_and_a_step_lies_between_two_ends() -> None:
    steps = [Event(STEP, end - 1, end) for end in (10.0, 20.0, 30.0)]
    moved = [Event(EXCHANGE, 8.0, 12.0), Event(EXCHANGE, 11.0, 14.0), Event(EXCHANGE, 29.0, 31.0), Event("x", 0, 40)]
    seen = profile.read([*steps, *moved], gpu=False, exchanges=True)
    assert (seen.steps, seen.step_ms, seen.exchange_ms) == (3, 10.0, pytest.approx((6.0 + 2.0) / 3))
    assert seen.lanes == {"exchange": ((0.0, 4.0),)}
    assert profile.read(steps, gpu=False, exchanges=False).exchange_ms is None


def test_kernels_are_exchanges_by_their_names() -> None:
    names = ("void purlin::gpu::direct_kernel<2>", "ncclDevKernel_AllGather", "sm90_gemm")
    events = [Event(name, i, i + 1.0, kernel=True) for i, name in enumerate(names)]
    seen = profile.read([Event(STEP, -1.0, 0.0), Event(STEP, 3.0, 4.0), *events], gpu=True, exchanges=True)
    assert seen.lanes == {"exchange": ((0.0, 2.0),), "other kernels": ((2.0, 3.0),)}
    assert seen.exchange_ms == 1.0


def test_of_torch_s_events_the_steps_and_one_gpu_s_kernels_are_read() -> None:
    def event(name: str, device: str, index: int = 0) -> Any:
        span = SimpleNamespace(start=1000.0, end=2000.0)
        return SimpleNamespace(name=name, device_type=f"DeviceType.{device}", device_index=index, time_range=span)

    events = [event(name, device) for name in (STEP, EXCHANGE, "gemm") for device in ("CPU", "CUDA")]
    found = list(profile.from_torch([*events, event("gemm", "CUDA", index=1)], 0))
    assert found == [Event(STEP, 1.0, 2.0), Event("gemm", 1.0, 2.0, kernel=True)]


def test_waits_of_the_host_are_counted_but_for_the_clock_s_own() -> None:
    steps = [Event(STEP, start, start + 1.0) for start in (0.0, 10.0, 20.0)]
    waits = [Event("cudaStreamSynchronize", at, at + 0.1) for at in (3.0, 4.0, 12.0, 0.5, 25.0)]
    clock = [Event(CLOCK, 1.1, 1.9), Event("cudaDeviceSynchronize", 1.2, 1.8)]
    assert profile.waits_a_step([*steps, *waits, *clock]) == 3 / 2
    assert profile.waits_a_step(steps[:1]) is None


def test_ranges_of_the_host_are_no_kernels() -> None:
    def event(name: str, device: str, *, annotation: bool = False) -> Any:
        span = SimpleNamespace(start=0.0, end=1.0)
        kind = f"DeviceType.{device}"
        return SimpleNamespace(
            name=name, device_type=kind, device_index=0, time_range=span, is_user_annotation=annotation
        )

    given = [
        event("purlin attention at x", "CUDA", annotation=True),
        event("nccl:all_gather", "CUDA", annotation=True),
        event("cudaStreamSynchronize", "CPU"),
        event("aten::mm", "CPU"),
        event("purlin root call of X", "CUDA"),
    ]
    found = list(profile.from_torch(given, 0))
    assert [each.name for each in found] == ["cudaStreamSynchronize", "purlin root call of X"]
    assert not any(each.exchange for each in found)


def test_the_host_s_clock_leaves_its_waits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives torch its functions back."""
    import torch

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: time.sleep(0.05))
    places = (torch.cuda, torch.cuda.Stream, torch.cuda.Event)
    before = [place.synchronize for place in places]
    with watch.waits() as waited:
        torch.cuda.synchronize()
        mine = waited()
        assert mine >= 0.05
        other = threading.Thread(target=torch.cuda.synchronize)
        other.start()
        other.join()
        assert waited() == mine
        assert [place.synchronize for place in places] != before
    assert [place.synchronize for place in places] == before


def test_memory_of_other_modes_is_not_this_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    model = torch.nn.Linear(8, 8)
    assert memory.held([model, model], "cpu") == (64 + 8) * 4
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 7_000_000_000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 9_000_000_000)
    monkeypatch.setattr(memory, "held", lambda *_: 3_000_000_000)
    others = memory.start(["cuda:0", "cuda:0"], [model])
    assert others == {"cuda:0": 4_000_000_000}
    assert memory.peak_gb(["cuda:0", "cuda:0"], others) == 5.0


def test_a_plot_holds_the_busiest_step() -> None:
    spans = [(i / 10, i / 10 + 0.05) for i in range(20_000)]
    joined = profile.within(spans, 0.0, 2000.0)
    assert 0 < len(joined) <= profile.MOST_SPANS
    assert (joined[0][0], joined[-1][1]) == (0.0, pytest.approx(1999.95))


# ---- bad input
@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--size", "big"], "--size needs pixels"),
        (["--size", "64x0"], "--size needs pixels"),
        (["--size", "1x2x3"], "--size needs pixels"),
        (["--size", "64", "--height", "64"], "leave those out"),
        (["--attention", "gather_kv,alien"], "`attention` needs"),
        (["--model", "tiny:flux", "--size", "65"], "needs a multiple of 16 pixels"),
        (["--repeats", "0"], "--repeats needs 1 or more"),
        (["--warmup", "0"], "--warmup needs 1 or more"),
        (["--model", "nothing"], "--model needs one of"),
        (["--html", "/dev/null/x.html"], "--html /dev/null/x.html cannot be written"),
        (["--record", "/dev/null/x.jsonl"], "--record /dev/null/x.jsonl cannot be written"),
    ],
)
@pytest.mark.parametrize("command", [latency.run, compare.run])
def test_bad_options_are_one_line(
    command: Callable[[argparse.Namespace], int], arguments: list[str], needed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    (latency if command is latency.run else compare).add_arguments(parser)
    assert command(parser.parse_args(arguments)) == WRONG_INPUT
    told = capsys.readouterr().err
    assert needed in told
    assert len(told.splitlines()) == 1


def test_a_way_to_run_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["latency", "--how", "fast"])
    assert ended.value.code == WRONG_INPUT
    assert "compile+graph" in capsys.readouterr().err


def test_size_is_width_by_height() -> None:
    options, asked = read("--model", "tiny:flux", "--size", "64x48")
    assert (options.width, options.height) == (64, 48)
    assert read("--model", "tiny:flux", "--size", "64")[0].height == 64
    assert asked.hows == HOWS[:2]


def test_eager_is_always_there_to_compare_with() -> None:
    assert read("--how", "compile+graph", "compile")[1].hows == ("eager", "compile", "compile+graph")


# ---- the record
def test_benchmarks_shows_the_newest_run_of_pictures(two: Result) -> None:
    new = [{**line, "date": "2031-01-01", "run": "new", "commit": "newer"} for line in record.lines(two)]
    old = [{**line, "date": "2030-01-01", "run": "old", "commit": "older"} for line in record.lines(two)]
    text = benchmarks.text_of([], [*new, *old])
    assert text == benchmarks.text_of([], [*old, *new])
    assert text.count("## A picture: tiny:flux, 64x48, 2 steps, 2 ranks") == 1
    assert "commit newer" in text and "commit older" not in text
    assert "| ours | eager | 2 |" in text
    assert "- ours, compile: not asked for: --how compile" in text


def test_a_line_that_is_no_picture_is_named(tmp_path: Path) -> None:
    file = tmp_path / "latency.jsonl"
    file.write_text(json.dumps({"run": "x"}) + "\n")
    with pytest.raises(ValueError, match=r"latency.jsonl:1: needs .*ms_per_step"):
        benchmarks.pictures_on_record(file)


def test_a_record_grows_and_every_line_is_json(two: Result, tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    for _ in range(2):
        record.append(file, record.lines(two))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]
    assert len(lines) == 2 * len(two.rows)
    assert len({line["run"] for line in lines}) == 2


# ---- the page
def test_the_page_needs_nothing_beside_it_and_says_all(two: Result) -> None:
    html = page.page(two)
    assert "<script" not in html and "http" not in html.replace("http-equiv", "")
    assert html.count("<svg") == 1 + len([row for row in two.measured if row.profile and row.profile.lanes])
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert len(pictures) == len(two.measured)
    assert all(base64.b64decode(each).startswith(b"\x89PNG") for each in pictures)
    for why, _ in table.reasons(two.rows):
        assert page.escape(why) in html


def test_text_of_others_is_no_markup(two: Result) -> None:
    bad = replace(two, rows=tuple(replace(row, cannot="<b>&" if row.cannot else "") for row in two.rows))
    assert "<b>&<" not in page.page(bad)


def test_a_browser_shows_the_rows(two: Result, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here: apt install chromium")
    file, shot = tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(page.page(two))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    look = [*flags, "--window-size=500,1600", file.as_uri()]
    shown = subprocess.run([browser, *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=60)
    for row in two.rows:
        assert f"<td>{row.mode.name}</td>" in shown.stdout
    subprocess.run([browser, f"--screenshot={shot}", *look], capture_output=True, timeout=60, check=True)
    from PIL import Image

    with Image.open(shot) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
    assert {(0x2F, 0x6F, 0xDE), (0xD4, 0x57, 0x2A)} <= colours  # page.css: our bars, and the exchanges of a step


# ---- compare
def test_compare_is_one_screen_that_tells_what_is_not_known(two: Result) -> None:
    screen = compare.screen(two).splitlines()
    assert len(screen) <= 30
    assert max(map(len, screen)) <= compare.SCREEN
    assert screen[1].startswith(("-> Yes", "-> Not for this model here"))
    text = " ".join(line.strip() for line in screen)
    for row in two.rows:
        assert row.mode.name in text
    assert "what GPUs gain" in text
    for why, _ in table.reasons(two.rows):
        assert why in text


def test_the_verdict_is_of_what_was_measured(two: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    result = of_two_ranks(monkeypatch)
    assert compare.verdict(result) == "Yes: a picture 2.00x as fast as by one rank (1 rank (2), eager)."
    slower = [replace(row, whole_s=rows.Spread(9.0, 9.0, 9.0)) if row.mode == PURLIN else row for row in result.rows]
    assert compare.verdict(replace(result, rows=tuple(slower))).startswith(
        "Not for this model here: ours (ours, eager) takes 3.00x"
    )
    without = replace(result, rows=tuple(row for row in result.rows if row.mode != PURLIN))
    assert compare.verdict(without).startswith("No answer: ours could not be measured")


def test_a_shared_gpu_gives_no_verdict_on_speed(two: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "sharing", lambda _: "2 ranks share cuda:0: this shows that it works, not how fast")
    assert compare.verdict(two).startswith("No answer on speed: 2 ranks share cuda:0")


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (2, 2), (16, 8)])
def test_compare_takes_what_the_box_has(gpus: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "gpus", lambda: gpus)
    assert compare.default_ranks() == ranks


def test_compare_runs(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    assert compare.run(parser.parse_args([*TINY, "--ranks", "2", "--threads", "--repeats", "1"])) == 0
    assert capsys.readouterr().out.startswith("tiny:flux on 2 ranks")
