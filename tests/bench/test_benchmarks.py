"""BENCHMARKS.md against the record."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import benchmarks

from tests.bench.lines import line, row_of, several


def test_the_committed_text_is_what_the_record_gives() -> None:
    text = benchmarks.text_of(benchmarks.on_record(), benchmarks.pictures_on_record())
    assert benchmarks.TARGET.read_text() == text
    assert benchmarks.main(["--check"]) == 0


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
