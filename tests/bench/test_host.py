"""The benchmark of collectives runs, checks what it times, and writes what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_short_run_reports_every_rival(tmp_path: Path) -> None:
    report = tmp_path / "out" / "rows.json"
    arguments = [
        "--ranks",
        "2",
        "--op",
        "all_gather",
        "all_reduce",
        "--bytes",
        "1024",
        "65536",
        "--rounds",
        "2",
        "--json",
        str(report),
    ]
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench_collectives.py", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(report.read_text())["rows"]
    cells = [(row["op"], row["bytes"], row["rival"]) for row in rows]
    names = ("gloo", "purlin", "purlin, granted")
    assert cells == [(op, n, rival) for op in ("all_gather", "all_reduce") for n in (1024, 65536) for rival in names]
    assert all(0 < row["min_us"] <= row["median_us"] and row["rounds"] == 2 for row in rows)
    assert all(row["times_gloo"] == 1 for row in rows if row["rival"] == "gloo")
    assert run.stdout.count("\n") == 1 + len(rows) - 4


def test_bytes_that_cannot_be_shared_are_refused() -> None:
    arguments = ["--ranks", "3", "--bytes", "1024"]
    command = [sys.executable, ROOT / "scripts" / "bench_collectives.py", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert run.returncode == 2 and "bytes divisible by 12" in run.stderr
