"""Lines of a record, and what becomes of them in BENCHMARKS.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bench.record import Line, Run

RUN = Run("run1", "2026-01-01T00:00:00+00:00", "abc", "Linux", "1 x NVIDIA Test", {"torch": "2.11"})


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
