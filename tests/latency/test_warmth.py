"""The GPUs' warmth beside the times: when it is read, that it costs nothing where it is not known, and when a comparison is called unfair."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import benchmarks

from purlin_diffusion.commands import compare, picture
from purlin_diffusion.commands.picture import Seconds
from purlin_diffusion.commands.timing import page, rank, record, rows, table, warmth
from purlin_diffusion.commands.timing.rows import Result
from purlin_diffusion.commands.timing.visit import Visit
from purlin_diffusion.commands.timing.warmth import MUCH_C, Warmth
from tests.latency.runs import PURLIN, measured

GPUS = {"GPU-of-0": Warmth(38, 420.5), "GPU-of-1": Warmth(67, 690.0)}
UNKNOWN = "GPUs, after each timed call: warmth not known."


class Nvml:
    """The driver's library, whose function `fails` returns an error, or is not there where it is `lacking`."""

    def __init__(self, fails: str = "", lacking: str = "") -> None:
        self.fails, self.lacking, self.asked = fails, lacking, list[str]()

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == self.lacking:
            raise AttributeError(name)
        return lambda *args: 999 if name == self.fails else self.answer(name, *args)

    def answer(self, name: str, *args: Any) -> int:
        self.asked.append(name)
        if name == "nvmlDeviceGetHandleByUUID":
            args[1]._obj.value = 1 + list(GPUS).index(args[0].decode())
        elif name != "nvmlInit_v2":
            gpu = list(GPUS.values())[args[0].value - 1]
            power = name == "nvmlDeviceGetPowerUsage"
            args[-1]._obj.value = int((gpu.power_w or 0) * 1e3) if power else gpu.temperature_c
        return 0


def with_nvml(monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Any]) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of-{device[-1]}"))
    monkeypatch.setattr(ctypes, "CDLL", load)


def missing(_: str) -> Any:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


# ---- reading
def test_each_gpu_is_asked_once_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    with_nvml(monkeypatch, lambda _: nvml)
    assert warmth.read(["cuda:1", "cuda:0", "cuda:1"]) == (GPUS["GPU-of-1"], GPUS["GPU-of-0"])
    assert nvml.asked.count("nvmlDeviceGetTemperature") == nvml.asked.count("nvmlDeviceGetPowerUsage") == 2


def test_on_a_cpu_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with_nvml(monkeypatch, pytest.fail)
    assert warmth.read(["cpu", "cpu"]) == ()


@pytest.mark.parametrize(
    ("load", "known"),
    [
        (missing, Warmth()),
        (lambda _: Nvml(fails="nvmlInit_v2"), Warmth()),
        (lambda _: Nvml(fails="nvmlDeviceGetHandleByUUID"), Warmth()),
        (lambda _: Nvml(lacking="nvmlDeviceGetTemperature"), Warmth()),
        (lambda _: Nvml(fails="nvmlDeviceGetTemperature"), Warmth(None, 420.5)),
        (lambda _: Nvml(fails="nvmlDeviceGetPowerUsage"), Warmth(38, None)),
    ],
)
def test_what_nvml_does_not_say_is_null(
    load: Callable[[str], Any], known: Warmth, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_nvml(monkeypatch, load)
    assert warmth.read(["cuda:0"]) == (known,)
    on_record = warmth.on_record([[known]])
    assert (on_record["temperature_c"] is None) == (known.temperature_c is None)
    assert (on_record["power_w"] is None) == (known.power_w is None)


def test_it_is_read_once_a_timed_call_when_the_clock_has_stopped_and_before_all_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    def told(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def doing(*args: Any) -> Any:
            events.append(name)
            return do(*args)

        return doing

    monkeypatch.setattr(picture, "now", told("clock", picture.now))
    monkeypatch.setattr(rank, "array", told("picture", rank.array))
    monkeypatch.setattr(warmth, "read", told("read", lambda _: (Warmth(50, 500.0),)))
    result = measured()  # one warm-up; then each mode is watched, and not read
    visit = ["clock", "clock", "clock", "clock", "read", "picture"]
    assert events[: len(visit) * len(result.measured)] == visit * len(result.measured)
    assert events.count("read") == len(result.measured)
    assert all(row.warmth == ((Warmth(50, 500.0),),) for row in result.measured)


# ---- telling
def of(*repeats: Sequence[int | None]) -> list[list[Warmth]]:
    """[repeat][GPU], by temperatures."""
    return [[Warmth(each) for each in repeat] for repeat in repeats]


@pytest.mark.parametrize(
    ("cool", "warm", "by"),
    [
        (of([50]), of([50 + MUCH_C]), 0),
        (of([50]), of([51 + MUCH_C]), 1 + MUCH_C),
        (of([38], [66], [67]), of([67], [66], [66]), 0),  # one repeat is not the median
        (of([38], [40]), of([66], [68]), 28),
        (of([40]), of([40, 70]), 0),  # another GPU, in another place
        (of([40, 50]), of([40, 70]), 20),
        (of([None]), of([70]), 0),
        (of([None], [40]), of([70], [70]), 30),
        ([[]], [[]], 0),
        ([], [], 0),
    ],
)
def test_a_comparison_is_unfair_where_the_same_gpu_was_much_cooler(cool: Any, warm: Any, by: int) -> None:
    told = warmth.unlike({"cool, eager": cool, "warm, eager": warm})
    assert len(told) == (by > 0)
    assert all(f"in cool, eager ({by} C)." in line and "warm, eager" not in line for line in told)


def warmed(result: Result, first: int, others: int) -> Result:
    """As if the first mode's GPU had been `first` C warm, and all others' `others`."""
    seen = [row for row in result.rows if row.whole_s]
    at = {row.mode: ((Warmth(first if row is seen[0] else others, 420.5),),) for row in seen}
    return replace(result, rows=tuple(replace(row, warmth=at.get(row.mode, ())) for row in result.rows))


def test_all_that_is_printed_says_how_warm_and_whether_it_was_fair(two: Result) -> None:
    span, hint = "GPUs, after each timed call: 38 to 67 C, 420 to 420 W.", "Not alike: "
    unfair, fair = warmed(two, 38, 67), warmed(two, 60, 67)
    for told in (table.text, page.page):
        assert span in told(unfair) and hint in told(unfair)
        assert UNKNOWN not in told(fair) and hint not in told(fair)
        assert "GPUs, after" not in told(two) and hint not in told(two)  # of a CPU
    assert hint in compare.screen(unfair) and hint not in compare.screen(two)


def test_a_gpu_of_which_nothing_is_known_is_spoken_of_and_a_cpu_is_not() -> None:
    assert warmth.said({"eager": [[Warmth()]]}) == [UNKNOWN]
    assert warmth.said({"eager": [[], []]}) == warmth.said({}) == []


def test_a_row_has_every_repeat_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [[Visit(PURLIN, Seconds(1, ()), warmth=(Warmth(10 * r + n),)) for n in (1, 2)] for r in (1, 2)]
    watched = Visit(PURLIN)
    row = rows.row(PURLIN, [[*visits, watched] for visits in ranks])
    facts = record.row_facts(row)
    assert (facts["temperature_c"], facts["power_w"]) == ([[11, 21], [12, 22]], None)
    assert record.plain(row)["warmth"][1][0] == {"temperature_c": 12, "power_w": None}


def test_a_record_without_warmth_reads_as_one_with_it(two: Result, tmp_path: Path) -> None:
    file = tmp_path / "latency.jsonl"
    record.append(file, record.lines(warmed(two, 38, 67)))
    new = benchmarks.pictures_on_record(file)
    assert new[0]["temperature_c"] == [[38]] and new[0]["power_w"] == [[420.5]]
    assert all(line["temperature_c"] is None and line["power_w"] is None for line in record.lines(two))
    old = [{name: value for name, value in line.items() if name not in warmth.UNITS} for line in new]
    file.write_text("".join(json.dumps(line) + "\n" for line in old))
    assert benchmarks.pictures_on_record(file) == old
    assert benchmarks.text_of([], old) == benchmarks.text_of([], new)
