"""BENCHMARKS.md from what stands on record in scripts/record/*.jsonl: `python scripts/benchmarks.py` writes it, `--check` compares.

The same record gives the same text, to the byte. Of each machine kind, collective and world the newest run is shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.record import ROOT, Line, read

RECORDS = ROOT / "scripts" / "record"
UNASKED = "not asked for"  # so begins why a mode is not there that the call left out
PICTURES = RECORDS / "latency.jsonl"  # of `python -m purlin_diffusion latency --record`; all others are of collectives
TARGET = ROOT / "BENCHMARKS.md"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
RIVALS = ("nccl", "nccl_symmetric", "torch_symm_mem")
EVEN = "purlin_even"  # ours with equal shares, beside uneven ones
OURS = ("purlin", EVEN)
YARDSTICKS = ("torch_copy", "purlin_copy", "torch_relayout")
PICTURE_FIELDS = (
    *(
        "run",
        "date",
        "commit",
        "machine",
        "gpus",
        "versions",
        "model",
        "size",
        "steps",
        "world",
        "mode",
        "ranks",
        "graph",
        "compile",
    ),
    *("ms_per_step", "total_s", "images_per_s", "memory_gb", "exchange_ms_per_step", "max_abs", "psnr_db", "why"),
    *("decode_ms", "host_ms_per_step", "error_call_over_one"),
)
NOT_RUN = "not run"
WORLDS = ("processes", "local")  # in this order
HEAD = """# Benchmarks

Made from scripts/record/*.jsonl by `python scripts/benchmarks.py`; not edited by hand. First whole pictures, by `python -m purlin_diffusion latency`,
then collectives, by `python scripts/bench_collectives.py`.
"""
PICTURES_HEAD = """# Pictures

Milliseconds a step: the median over repeats, in which all modes took turns on the same machine.
"""
COLLECTIVES_HEAD = """# Collectives

Microseconds a call: the median over rounds of the slowest
rank's time, in which all columns took turns on the same machine, replaying CUDA graphs of chained calls, or, where it says so, calling from Python.
Buffers rotate beyond the L2 cache; where only buffers within it were measured, the size is marked `hot`. Bytes are those of the whole message, of an
all-gather its output, of the others their input. GB/s is bus bandwidth as nccl-tests defines it, 1e9 bytes a second, of our fastest. Where the name
ends in `_v` shares differ: every second rank has an eighth less, bytes and bus bandwidth are those of equal shares as large as the largest, and
purlin_even is the call with those.
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="say whether BENCHMARKS.md is what the record gives, and write nothing"
    )
    text = text_of(on_record(), pictures_on_record())
    if not parser.parse_args(arguments).check:
        TARGET.write_text(text)
        return 0
    same = TARGET.exists() and TARGET.read_text() == text
    print(
        "BENCHMARKS.md is up to date"
        if same
        else "BENCHMARKS.md is not what the record gives: python scripts/benchmarks.py"
    )
    return int(not same)


def on_record() -> list[Line]:
    """Raises ValueError, which names the file and the line that is no Line."""
    return [line for path in sorted(RECORDS.glob("*.jsonl")) if path != PICTURES for line in read(path)]


def pictures_on_record(path: Path = PICTURES) -> list[Mapping[str, Any]]:
    """Raises ValueError, which names the line that has not what is shown of it."""
    lines = []
    for number, text in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
        line = json.loads(text)
        if missing := [name for name in PICTURE_FIELDS if name not in line]:
            raise ValueError(f"{path.name}:{number}: needs the fields of a picture's line; missing: {missing}")
        lines.append(line)
    return lines


def text_of(lines: Iterable[Line], pictures: Iterable[Mapping[str, Any]] = ()) -> str:
    """The whole file."""
    every = newest(lines)
    places = sorted(
        {(line.world, line.ranks, line.gpus) for line in every}, key=lambda place: (WORLDS.index(place[0]), place)
    )
    parts = [HEAD, PICTURES_HEAD, *(_pictures(list(pictures)) or [f"{NOT_RUN}\n"]), COLLECTIVES_HEAD]
    parts += [
        _place(*place, [line for line in every if (line.world, line.ranks, line.gpus) == place]) for place in places
    ]
    for world, where in zip(WORLDS, ("Several GPUs", "One GPU"), strict=True):
        if not any(line.world == world for line in every):
            parts.append(f"## {where}\n\n{NOT_RUN}\n")
    return "\n".join(parts)


def newest(lines: Iterable[Line]) -> list[Line]:
    """Of each machine kind, world, rank count, collective, mode and choice of schedule (made or forced) the lines of the newest run."""
    every = list(lines)

    def subject(line: Line) -> tuple[object, ...]:
        return line.gpus, line.world, line.ranks, line.collective, line.mode, line.dtype, line.forced

    latest: dict[tuple[object, ...], tuple[str, str]] = {}
    for line in every:
        latest[subject(line)] = max(latest.get(subject(line), ("", "")), (line.date, line.run))
    return [line for line in every if latest[subject(line)] == (line.date, line.run)]


def _place(world: str, ranks: int, gpus: str, lines: Sequence[Line]) -> str:
    where = f"{ranks} ranks as threads" if world == "local" else f"{ranks} processes"
    parts = [f"## {gpus}, {where}\n"]
    names = [*COLLECTIVES, *sorted({line.collective for line in lines} - set(COLLECTIVES))]
    for name in names:
        mine = [line for line in lines if line.collective == name]
        if not mine:
            parts.append(f"### {name}\n\n{NOT_RUN}\n")
        for mode in sorted({line.mode for line in mine}, reverse=True):
            for dtype in sorted({line.dtype for line in mine if line.mode == mode}):
                parts.append(
                    _collective(name, mode, dtype, [line for line in mine if (line.mode, line.dtype) == (mode, dtype)])
                )
    return "\n".join(parts)


def _collective(name: str, mode: str, dtype: str, lines: Sequence[Line]) -> str:
    chosen = [line for line in lines if not line.forced]
    parts = [f"### {name}, {dtype}{', called from Python' * (mode == 'eager')}\n"]
    if chosen:
        parts += [*_sources(chosen), "", *_table(chosen), ""]
        parts += [f"- {text}" for text in _reasons(chosen)]
    forced = [line for line in lines if line.forced and line.us is not None]
    if forced:
        parts += ["", "<details><summary>By regime and CTA budget</summary>\n", *_forced(forced), "\n</details>"]
    return "\n".join(parts).rstrip() + "\n"


def _sources(lines: Sequence[Line]) -> Iterator[str]:
    for run in sorted({(line.date, line.commit, line.machine, *line.versions.items()) for line in lines}):
        date, commit, machine, *versions = run
        yield f"{date}, commit {commit}, {machine}, " + ", ".join(" ".join(pair) for pair in versions)


# ---- one table -------------------------------------------------------------------------------------------------------


def _table(lines: Sequence[Line]) -> Iterator[str]:
    """A row a size; a column a rival, apart and in place; then how many times as long as ours the best rival takes, and ours as with equal shares."""
    columns = sorted({_column(line) for line in lines if line.us is not None}, key=_place_of)
    places = [place for place in (False, True) if any(column[2] is place for column in columns)]
    against = RIVALS if any(line.provider in RIVALS and line.us is not None for line in lines) else ("torch_copy",)
    versus = "best rival / ours" if against is RIVALS else "ours / torch's copy"
    even = [column for column in columns if column[0] == EVEN]
    over_even = [f"ours / even{_granted(column)}" for column in even]
    titles = ["bytes", *map(_title, columns), *(f"{versus}{_where(place)}" for place in places), *over_even, "GB/s"]
    yield _row(titles)
    yield _row(["---", *("---:" for _ in titles[1:])])
    for size in sorted({line.bytes for line in lines}):
        mine = _coldest([line for line in lines if line.bytes == size and line.us is not None])
        cells = [_cell([line for line in mine if _column(line) == column]) for column in columns]
        ratios = [_ratio(mine, place, against) for place in places]
        ratios += [_over_even(mine, registered) for _, registered, *_ in even]
        hot = " hot" * bool(mine and all(line.hot for line in mine))
        rates = [line.busbw_gbps for line in mine if line.provider == "purlin" and line.busbw_gbps is not None]
        yield _row([f"{size}{hot}", *cells, *ratios, f"{max(rates):.1f}" if rates else NOT_RUN])


def _column(line: Line) -> tuple[str, bool, bool, str]:
    shot = line.regime or "" if line.provider == "torch_symm_mem" else ""
    return line.provider, line.registered, line.in_place, shot


def _place_of(column: tuple[str, bool, bool, str]) -> tuple[bool, int, tuple[str, bool, bool, str]]:
    order = (*OURS, *RIVALS, *YARDSTICKS)
    provider, _, in_place, _ = column
    return in_place, order.index(provider) if provider in order else len(order), column


def _title(column: tuple[str, bool, bool, str]) -> str:
    provider, _, in_place, shot = column
    return f"{provider}{f' {shot}' if shot else ''}{_granted(column)}{_where(in_place)}"


def _granted(column: tuple[str, bool, bool, str]) -> str:
    provider, registered, *_ = column
    return ", granted" if provider in OURS and registered else ""


def _where(in_place: bool) -> str:
    return ", in place" if in_place else ""


def _coldest(lines: Sequence[Line]) -> list[Line]:
    """Those with buffers beyond the cache where there are any; sizes in which none of ours had them are hot."""
    cold = any(not line.hot for line in lines if line.provider == "purlin")
    beyond = {_column(line) for line in lines if not line.hot}
    return [line for line in lines if not line.hot or not cold or _column(line) not in beyond]


def _cell(lines: Sequence[Line]) -> str:
    if not lines:
        return NOT_RUN
    best = min(lines, key=_us)
    how = f" {best.regime}{f' {best.ctas}' if best.ctas else ''}" if best.provider in OURS and best.regime else ""
    return f"{_us(best):.2f}{how}"


def _ratio(lines: Sequence[Line], in_place: bool, against: Sequence[str]) -> str:
    ours = [_us(line) for line in lines if line.provider == "purlin" and line.in_place is in_place]
    theirs = [_us(line) for line in lines if line.provider in against and line.in_place is in_place]
    if not ours or not theirs:
        return NOT_RUN
    ratio = min(theirs) / min(ours)
    return f"{ratio:.2f}" if against is RIVALS else f"{1 / ratio:.2f}"


def _over_even(lines: Sequence[Line], registered: bool) -> str:
    ours, even = (
        [_us(line) for line in lines if line.provider == provider and line.registered is registered]
        for provider in OURS
    )
    return f"{min(ours) / min(even):.2f}" if ours and even else NOT_RUN


def _us(line: Line) -> float:
    assert line.us is not None
    return line.us


def _reasons(lines: Sequence[Line]) -> Iterator[str]:
    """What did not run, and why; at which sizes, where it ran at others."""
    ran = {(line.provider, line.in_place) for line in lines if line.us}
    sizes: dict[tuple[str, str, bool], set[int]] = {}
    for line in lines:
        if line.why:
            sizes.setdefault((line.provider, line.why, (line.provider, line.in_place) in ran), set()).add(line.bytes)
    for (provider, why, partly), of in sorted(sizes.items()):
        at = ", ".join(map(str, sorted(of)))
        yield f"{provider}{f' of {at} bytes' * partly}: {why}"


def _forced(lines: Sequence[Line]) -> Iterator[str]:
    yield _row(["bytes", "", "regime", "CTAs", "us", "GB/s"])
    yield _row(["---", "---", "---", "---:", "---:", "---:"])
    for line in sorted(
        lines, key=lambda line: (line.bytes, line.in_place, line.regime or "", line.ctas or 0, line.hot)
    ):
        place = " ".join(filter(None, ["in place" * line.in_place, "hot" * line.hot]))
        yield _row(
            [str(line.bytes), place, line.regime or "", str(line.ctas), f"{_us(line):.2f}", f"{line.busbw_gbps:.1f}"]
        )


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---- pictures --------------------------------------------------------------------------------------------------------


def _pictures(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each machine kind, model, size, step count and world the runs of which no newer one timed all the modes."""
    ranks = {run: max(line["ranks"] for line in lines if line["run"] == run) for run in {line["run"] for line in lines}}
    runs: dict[tuple[tuple[object, ...], str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        where = line["machine"] if line["gpus"] == "none" else line["gpus"]
        subject = (where, line["model"], line["size"], line["steps"], line["world"], ranks[line["run"]])
        runs.setdefault((subject, line["date"], line["run"]), []).append(line)
    kept: list[tuple[tuple[object, ...], str, str]] = []
    for key in sorted(runs, key=str, reverse=True):  # the newest first
        newer = [other for other in kept if other[0] == key[0]]
        if not any(_timed(runs[key]) <= _timed(runs[other]) for other in newer):
            kept.append(key)
    return [_run_of_pictures(runs[key]) for key in sorted(kept, key=lambda key: (-_count(key[0][0]), str(key)))]


def _count(gpus: object) -> int:
    """Of "2 x NVIDIA H200"; 0 of a machine without."""
    count, _, name = str(gpus).partition(" x ")
    return int(count) if name and count.isdigit() else 0


def _timed(run: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    return {(line["mode"], _how(line)) for line in run if not line["why"]}


def _run_of_pictures(lines: Sequence[Mapping[str, Any]]) -> str:
    first = lines[0]
    most = max(line["ranks"] for line in lines)
    ranks = "1 rank" if most == 1 else f"{most} ranks" + " as threads" * (first["world"] == "threads")
    where = first["machine"] if first["gpus"] == "none" else first["gpus"]
    titles = [
        "mode",
        "",
        "ranks",
        "ms a step",
        "ms to decode",
        "s a picture",
        "pictures a minute",
        "GB a rank",
        "exchanges, ms a step",
        "host, ms a step",
        "error / 1 rank's",
        "PSNR, dB",
    ]
    parts = [
        f"## {first['model']}, {first['size']}, {first['steps']} steps, {ranks}, {where}, {first['date'][:16]}\n",
        f"{first['date']}, commit {first['commit']}, {first['machine']}, "
        + ", ".join(" ".join(pair) for pair in first["versions"].items())
        + "\n",
        _row(titles),
        _row(["---", "---", *("---:" for _ in titles[2:])]),
        *(_row(_picture_cells(line)) for line in lines if not line["why"]),
    ]
    return "\n".join([*parts, "", *_unpictured(lines)]).rstrip() + "\n"


def _unpictured(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What could not run, and why; what was not asked for says nothing."""
    hows: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if line["why"] and not line["why"].startswith(UNASKED):
            hows.setdefault((line["mode"], line["why"]), []).append(_how(line))
    yield from (f"- {mode} ({', '.join(each)}): {why}" for (mode, why), each in hows.items())


def _picture_cells(line: Mapping[str, Any]) -> list[str]:
    same = "same bits" if line["max_abs"] == 0 else ""
    fewer = line.get("timed", line["repeats"]) < line["repeats"]
    figures = [
        _figure(line["ms_per_step"], ".2f") + f" ({line.get('timed')} of {line['repeats']} repeats)" * fewer,
        _figure(line["decode_ms"], ".1f"),
        _figure(line["total_s"], ".3f"),
        _figure(line["images_per_s"] and line["images_per_s"] * 60, ".1f"),
        _figure(line["memory_gb"], ".2f"),
        _figure(line["exchange_ms_per_step"], ".2f"),
        _figure(line["host_ms_per_step"], ".2f"),
        _figure(line["error_call_over_one"], ".2f"),
        _figure(line["psnr_db"], ".1f") or same,
    ]
    return [line["mode"], _how(line), str(line["ranks"]), *figures]


def _how(line: Mapping[str, Any]) -> str:
    return "+".join(filter(None, ["compile" * line["compile"], "graph" * line["graph"]])) or "eager"


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
