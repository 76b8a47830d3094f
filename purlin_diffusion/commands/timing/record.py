"""What a run leaves for programs: a line of JSON a row, for a record that grows, and all of it for a file of its own."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from purlin_diffusion.commands.machine import cores, versions
from purlin_diffusion.commands.picture import call_arguments
from purlin_diffusion.commands.timing.rows import Result, Row, Spread
from purlin_diffusion.commands.timing.visit import Visit
from purlin_diffusion.commands.timing.warmth import on_record

HERE = Path(__file__).resolve().parent


def append(file: Path, records: Iterable[dict[str, Any]]) -> None:
    with file.open("a") as record:
        record.writelines(json.dumps(line) + "\n" for line in records)


def lines(result: Result) -> list[dict[str, Any]]:
    """Times in ms and s, memory in 1e9 bytes; None is what was not measured, and `why` says why where nothing was."""
    run = run_facts(result) | asked_facts(result)
    return [run | row_facts(row) for row in result.rows]


def run_facts(result: Result) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    return {
        "run": result.run,
        "date": now.isoformat(),
        "commit": result.asked.commit or commit(),
        "machine": f"{platform.system()} {platform.machine()}, {cores()} cores",
        "gpus": gpu_names(),
        "versions": versions(),
    }


def asked_facts(result: Result) -> dict[str, Any]:
    options, arguments = result.options, call_arguments(result.options)
    sides = arguments.get("width"), arguments.get("height")
    return {
        "model": options.model,
        "size": f"{sides[0]}x{sides[1]}" if all(sides) else "default",
        "steps": arguments.get("num_inference_steps"),
        "attention": ",".join(result.asked.attentions),
        "dtype": options.dtype or "default",
        "world": options.mode,
        "repeats": result.asked.repeats,
        "warmup": result.asked.warmup,
    }


def row_facts(row: Row) -> dict[str, Any]:
    mode, none = row.mode, Spread(float("nan"), float("nan"), float("nan"))
    step, total = row.step_s or none, row.whole_s or none
    return {
        "mode": mode.name,
        "backend": mode.backend,
        "ranks": mode.ranks,
        "graph": mode.graph,
        "compile": mode.compile,
        "timed": row.repeats,
        "ms_per_step": or_none(step.median * 1e3),
        "ms_per_step_low": or_none(step.least * 1e3),
        "ms_per_step_high": or_none(step.most * 1e3),
        "total_s": or_none(total.median),
        "total_s_low": or_none(total.least),
        "total_s_high": or_none(total.most),
        "images_per_s": row.images_per_s,
        "memory_gb": row.memory_gb,
        **on_record(row.warmth),
        "exchange_ms_per_step": row.profile.exchange_ms if row.profile else None,
        "exchange_share": row.profile.share if row.profile else None,
        "syncs_per_step": row.profile.syncs if row.profile else None,
        "decode_ms": row.decode_s.median * 1e3 if row.decode_s else None,
        "host_ms_per_step": row.host.ms if row.host else None,
        "allocations_per_step": row.host.allocations if row.host else None,
        "mallocs_per_step": row.host.mallocs if row.host else None,
        "graphs_recorded": row.graphs.captures if row.graphs else None,
        "graphs_replayed": row.graphs.replays if row.graphs else None,
        "error_call": row.error.call if row.error else None,
        "error_picture": row.error.picture if row.error else None,
        "error_call_over_one": row.over_one[0] if row.over_one else None,
        "error_picture_over_one": row.over_one[1] if row.over_one else None,
        "max_abs": row.likeness.max_abs if row.likeness else None,
        "psnr_db": row.likeness.psnr_db if row.likeness else None,
        "why": row.cannot,
        "note": row.note,
    }


def or_none(value: float) -> float | None:
    return None if value != value else value  # NaN, which JSON has not


def whole(result: Result) -> dict[str, Any]:
    """Rows, every repeat of every rank, and the machine; pictures and timelines apart."""
    return {
        **run_facts(result),
        **asked_facts(result),
        "options": asdict(result.options),
        "arguments": call_arguments(result.options),
        "cores": cores(),
        "rows": [plain(row) for row in result.rows],
        "visits_by_rank": [[plain(visit) for visit in of_rank] for of_rank in result.visits],
    }


def plain(item: Row | Visit) -> dict[str, Any]:
    """The mode by its name, how it runs and its ranks; the difference as one figure."""
    facts = {
        name: value for name, value in asdict(item).items() if name not in {"mode", "picture", "profile", "likeness"}
    }
    mode, likeness = item.mode, item.likeness
    difference = likeness.max_abs if likeness else None
    return {"mode": mode.name, "how": mode.how, "ranks": mode.ranks, **facts, "difference": difference}


def gpu_names() -> str:
    """As "2 x NVIDIA H200"; "none"."""
    import torch

    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"


def commit() -> str:
    """Of the tree this runs from, "+" where files differ from it; "unknown" for an installed package."""
    found = git("rev-parse", "--short=12", "HEAD") if git("ls-files", "--", Path(__file__).name) else ""
    return found + "+" * bool(git("status", "--porcelain", "--untracked-files=no")) if found else "unknown"


def git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
