"""latency and compare: every mode is a row with figures or a reason, one rank is the reference, and what is written is what was measured."""

from __future__ import annotations

import argparse
import base64
import json
import re
import shutil
import subprocess
import sys
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
from purlin_diffusion.__main__ import main
from purlin_diffusion.commands import compare, latency
from purlin_diffusion.commands.exits import WRONG_INPUT
from purlin_diffusion.commands.options import Options
from purlin_diffusion.commands.picture import Seconds
from purlin_diffusion.commands.timing import measure, opened, page, profile, record, rows, table
from purlin_diffusion.commands.timing.likeness import Likeness
from purlin_diffusion.commands.timing.measure import Visit
from purlin_diffusion.commands.timing.modes import HOWS, Asked, Mode, modes
from purlin_diffusion.commands.timing.profile import EXCHANGE, STEP, Event
from purlin_diffusion.commands.timing.rows import Result

TINY = ("--device", "cpu", "--model", "tiny:flux", "--steps", "2", "--seed", "3", "--height", "48", "--width", "64")
NAMES = ("1 rank", "accelerate device_map", "accelerate split prompts", "diffusers ulysses", "diffusers ring")
OURS = ("ours over torch", "ours")
ASKED = Asked(repeats=1, warmup=1, hows=("eager",))


def read(*arguments: str) -> tuple[Options, Asked]:
    parser = argparse.ArgumentParser()
    latency.add_arguments(parser)
    return latency.read(parser.parse_args(list(arguments)))


def measured(*arguments: str) -> Result:
    options, _ = read(*TINY, *arguments)
    result = latency.timed(options, ASKED)
    assert result is not None
    return result


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
    assert [row.mode for row in two.rows] == modes(two.options)
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
    draw, seeds = measure.call, iter(range(100))

    def other_seed(pipe: Any, arguments: dict[str, Any], *, seed: int, output: str) -> Any:
        return draw(pipe, arguments, seed=next(seeds), output=output)

    monkeypatch.setattr(measure, "call", other_seed)
    likenesses = [row.likeness for row in measured("--ranks", "2", "--threads").measured if row.likeness]
    assert len(likenesses) >= 2
    assert min(each.max_abs for each in likenesses) > 1e-2
    assert all(each.psnr_db is not None and each.psnr_db < 60 for each in likenesses)


def test_a_mode_that_cannot_run_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = opened.ours

    def no_torch(pipe: Any, options: Options, mode: Mode) -> Any:
        if mode.backend == "torch":
            raise StallError("no gloo here")
        return ours(pipe, options, mode)

    monkeypatch.setattr(opened, "ours", no_torch)
    result = measured("--ranks", "2", "--threads")
    assert [by_mode(result)[name].cannot for name in OURS] == ["no gloo here", ""]
    assert "no gloo here (ours over torch: eager)" in table.text(result)


def test_a_defect_of_ours_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError("a typo")

    monkeypatch.setattr(opened, "ours", broken)
    with pytest.raises(AttributeError, match="a typo"):
        measured("--ranks", "2", "--threads")


def test_a_mode_that_fails_once_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def spent(_pipe: Any, _options: Options, mode: Mode) -> Any:
        tries.append(mode.title)
        raise StallError("it stalls")

    monkeypatch.setattr(opened, "ours", spent)
    options, _ = read(*TINY, "--ranks", "2", "--threads")
    latency.timed(options, replace(ASKED, repeats=3, hows=("eager", "graph")))
    assert sorted(tries) == sorted(f"{name}, {how}" for name in OURS for how in ("eager", "graph"))


def test_one_rank_alone_says_what_it_lacks() -> None:
    options, asked = read(*TINY)
    result = latency.timed(options, replace(asked, repeats=1))
    assert result is not None
    assert [row.mode.kind for row in result.measured] == ["alone"]
    assert "needs 2 ranks" in by_mode(result)["diffusers ring"].cannot
    assert "graphs" in by_mode(result)["ours"].cannot


def test_a_copy_shares_its_weights_and_leaves_the_pipeline_alone() -> None:
    from purlin_diffusion.pipelines import load

    pipe = load("tiny:flux")
    copy = opened.sharing_weights(pipe)
    assert copy.transformer is not pipe.transformer and copy.vae is pipe.vae
    assert {id(x) for x in copy.transformer.parameters()} == {id(x) for x in pipe.transformer.parameters()}


def test_blocks_are_compiled_and_the_whole_where_diffusers_names_none() -> None:
    calls: list[str] = []

    def none_named() -> None:
        raise ValueError("no `_repeated_blocks`")

    opened.compile_blocks(lambda: calls.append("blocks"), otherwise=lambda: calls.append("whole"))
    opened.compile_blocks(none_named, otherwise=lambda: calls.append("whole"))
    assert calls == ["blocks", "whole"]


# ---- figures
ALONE_1, ALONE_2 = (Mode(f"1 rank ({n})", "alone", "none", "eager", threads=n) for n in (1, 2))
PURLIN, SPLIT = Mode("ours", "ours", "purlin", "eager", 2), Mode("split", "split", "accelerate", "eager", 2)


def of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(rows, "modes", lambda _: [ALONE_1, ALONE_2, SPLIT, PURLIN])

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
    assert "- ours, compile: torch.compile under parallelize is not built yet" in text


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
    assert compare.verdict(replace(result, rows=tuple(slower))).startswith("Not for this model here: ours takes 3.00x")
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
