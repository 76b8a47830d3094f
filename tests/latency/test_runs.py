"""latency: every mode is a row with figures or a reason, one rank is the reference, and what is wrong is named."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import benchmarks

from purlin_core.errors import StallError
from purlin_diffusion import opening
from purlin_diffusion.__main__ import main
from purlin_diffusion.commands import compare, latency, picture
from purlin_diffusion.commands.exits import FAILED, INTERRUPTED, WRONG_INPUT, InputError
from purlin_diffusion.commands.options import Options
from purlin_diffusion.commands.timing import (
    handmade,
    opened,
    page,
    rank,
    record,
    rows,
    table,
)
from purlin_diffusion.commands.timing import modes as timing_modes
from purlin_diffusion.commands.timing import truth as truth_of
from purlin_diffusion.commands.timing.modes import HOWS, Mode, cannot, modes
from purlin_diffusion.commands.timing.rows import Result
from purlin_diffusion.commands.timing.steps import Outputs
from purlin_diffusion.commands.timing.truth import Error, Truth
from purlin_diffusion.graph.policy import Graphs
from tests.diffusion.echo import EchoPool
from tests.latency.runs import (
    ASKED,
    NAMES,
    OURS,
    PURLIN,
    TINY,
    by_mode,
    measured,
    read,
    read_all,
    timed,
)


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
    assert "needs 2 ranks" in by_mode(result)["diffusers ring (cuDNN)"].cannot
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


def test_who_does_not_ask_for_it_is_not_watched() -> None:
    options, asked = read(*TINY, "--ranks", "2", "--threads", "--no-watch")
    assert not asked.watch and ASKED.watch
    result = timed(options, replace(ASKED, watch=False))
    visits = [visit for visit in result.visits[0] if not visit.cannot]
    assert {visit.mode.kind for visit in visits} >= {"alone", "ours"} and all(visit.seconds for visit in visits)
    assert not any(visit.profile or visit.host or visit.picture or visit.note for visit in visits)
    assert "could not be watched" not in table.text(result)


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
    attentions = ("gather_kv", "ulysses", "auto")  # by tokens twice; SD3 by halves of guidance
    result = timed(options, replace(ASKED, truth=True, attentions=attentions, who=("alone", "ours")))
    ours = [row for row in result.measured if row.mode.kind == "ours"]
    assert len(ours) == 3
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


# ---- bad input
@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--size", "big"], "--size needs pixels"),
        (["--size", "64x0"], "--size needs pixels"),
        (["--size", "1x2x3"], "--size needs pixels"),
        (["--size", "64", "--height", "64"], "leave those out"),
        (["--attention", "gather_kv,alien"], "`attention` needs"),
        (["--model", "tiny:flux", "--size", "65"], "--size needs a multiple of 16 pixels"),
        (["--model", "tiny:flux", "--width", "65"], "--width needs a multiple of 16 pixels"),
        (["--repeats", "0"], "--repeats needs 1 or more"),
        (["--warmup", "0"], "--warmup needs 1 or more"),
        (["--seed", str(2**63)], "--seed needs 0 to"),
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
