"""What latency writes, and compare: the record, the page and the screen say what was measured."""

from __future__ import annotations

import argparse
import base64
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import benchmarks

from purlin_diffusion.commands import compare
from purlin_diffusion.commands.timing import (
    page,
    record,
    rows,
    table,
)
from purlin_diffusion.commands.timing.rows import Result
from tests.latency.runs import (
    PURLIN,
    TINY,
    of_two_ranks,
)


# ---- the record
def test_benchmarks_shows_the_newest_run_of_pictures(two: Result) -> None:
    new = [{**line, "date": "2031-01-01", "run": "new", "commit": "newer"} for line in record.lines(two)]
    old = [{**line, "date": "2030-01-01", "run": "old", "commit": "older"} for line in record.lines(two)]
    text = benchmarks.text_of([], [*new, *old])
    assert text == benchmarks.text_of([], [*old, *new])
    assert text.count("## tiny:flux, 64x48, 2 steps, 2 ranks") == 1
    assert "commit newer" in text and "commit older" not in text
    assert "| ours | eager | 2 |" in text
    assert "- ours (graph, compile+graph): a CUDA graph needs a GPU" in text and "not asked for" not in text


def test_benchmarks_keeps_an_older_run_that_timed_more(two: Result) -> None:
    lines = record.lines(two)
    old = [{**line, "date": "2030-01-01", "run": "old", "commit": "older"} for line in lines]
    less = [{**line, "date": "2031-01-01", "run": "new", "commit": "newer"} for line in lines if line["mode"] != "ours"]
    graphs = [{**line, "graph": True} for line in old]
    for before, after in (
        (old, less),
        (graphs, [{**line, "graph": False, "run": "new", "date": "2031"} for line in old]),
    ):
        text = benchmarks.text_of([], [*after, *before])
        assert text.count("## tiny:flux, 64x48, 2 steps, 2 ranks") == 2
        assert text.index(f"{before[0]['date']}, commit") < text.index(f"{after[0]['date']}, commit")


def test_a_run_that_was_ended_says_how_many_repeats_it_timed(two: Result) -> None:
    lines = [{**line, "repeats": line["repeats"] + 1} for line in record.lines(two)]
    assert all(line["timed"] == line["repeats"] - 1 for line in lines if not line["why"])
    assert f"({lines[0]['timed']} of {lines[0]['repeats']} repeats)" in benchmarks.text_of([], lines)
    assert "repeats)" not in benchmarks.text_of([], record.lines(two))


def test_a_line_that_is_no_picture_is_named(tmp_path: Path) -> None:
    file = tmp_path / "latency.jsonl"
    file.write_text(json.dumps({"run": "x"}) + "\n")
    with pytest.raises(ValueError, match=r"latency.jsonl:1: needs .*ms_per_step"):
        benchmarks.pictures_on_record(file)


def test_a_record_grows_and_every_line_is_json(two: Result, tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    for result in (two, replace(two, run="another")):
        record.append(file, record.lines(result))
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


def test_the_page_of_a_run_that_was_ended_says_how_many_repeats_it_timed(two: Result) -> None:
    ended = replace(two, asked=replace(two.asked, repeats=30))
    told = table.ended_early(ended)
    assert "ours, eager: 1 of 30 repeats" in told and not table.ended_early(two)
    for line in told:
        assert line in table.text(ended) and f"<p>{line}</p>" in page.page(ended)


@pytest.mark.parametrize(("watch", "why"), [(False, "--no-watch"), (True, "the run ended before")])
def test_the_page_says_who_was_not_looked_at(watch: bool, why: str, two: Result) -> None:
    unseen = tuple(replace(row, profile=None) for row in two.rows)
    nobody = replace(two, rows=unseen, asked=replace(two.asked, watch=watch))
    html = page.page(nobody)
    names = "; ".join(row.mode.title for row in two.measured)
    assert f"<p>Not looked at ({why}): {names}</p>" in html and "No exchange was seen" not in html
    some = replace(
        nobody, rows=tuple(row if row.mode.kind == "ours" else replace(row, profile=None) for row in two.rows)
    )
    assert "<h3>ours, eager</h3>" in page.page(some) and f"Not looked at ({why}): 1 rank" in page.page(some)
    failed = replace(nobody, rows=tuple(replace(row, note="no room") if row.whole_s else row for row in unseen))
    assert "<p>ours, eager could not be watched: no room</p>" in page.page(failed)
    assert "Not looked at" not in page.page(two) + page.page(failed)


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


def test_compare_says_which_repeats_are_missing(two: Result) -> None:
    early = replace(two, asked=replace(two.asked, repeats=two.asked.repeats + 1))
    assert f"{early.measured[0].mode.title}: {two.asked.repeats} of {early.asked.repeats} repeats" in compare.screen(
        early
    )
    assert f" of {two.asked.repeats} repeats" not in compare.screen(two)


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
