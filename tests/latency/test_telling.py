"""What was measured is told whatever becomes of stdout or of one file, at a run's end as at an early one; what is lost is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

import purlin_diffusion
from purlin_diffusion.__main__ import main
from purlin_diffusion.commands import latency
from purlin_diffusion.commands.exits import DONE, FAILED, INTERRUPTED
from purlin_diffusion.commands.picture import Seconds
from purlin_diffusion.commands.timing.modes import modes
from purlin_diffusion.commands.timing.visit import Visit, Visits, keep
from tests.latency.runs import TINY

Measure = Callable[..., list[Visits]]


def to_its_end(_first: Any, sizes: Any, asked: Any, so_far: Path) -> list[Visits]:
    visits = [Visit(mode, Seconds(1.0, (0.5,))) for mode in modes(sizes[0], asked)]
    keep([[visits]], so_far)
    return [[visits]]


def interrupted(*given: Any) -> list[Visits]:
    found = to_its_end(*given)
    signal.raise_signal(signal.SIGINT)
    return found


ENDS = [(to_its_end, FAILED), (interrupted, INTERRUPTED)]
FILES = ("json", "record", "html")


def files_in(folder: Path) -> dict[str, Path]:
    return {name: folder / f"run.{name}" for name in FILES}


def run(monkeypatch: pytest.MonkeyPatch, measure: Measure, folder: Path, command: str = "latency") -> int:
    """The exit code of a run of one rank that asks for all files."""
    monkeypatch.setattr(latency, "measure", measure)
    asked = [word for name, file in files_in(folder).items() for word in (f"--{name}", str(file))]
    return main([command, *TINY, "--ranks", "1", "--repeats", "1", *asked])


# ---- stdout
def of_a_reader_that_is_gone() -> TextIO:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def of_a_full_disk() -> TextIO:
    return Path("/dev/full").open("w")


@pytest.fixture(params=[of_a_reader_that_is_gone, of_a_full_disk])
def deaf(request: pytest.FixtureRequest) -> Iterator[TextIO]:
    with request.param() as stream:
        yield stream


@pytest.mark.parametrize(("measure", "code"), ENDS)
@pytest.mark.parametrize("command", ["latency", "compare"])
def test_files_are_written_whatever_becomes_of_stdout(
    command: str,
    measure: Measure,
    code: int,
    deaf: TextIO,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdout", deaf)
    assert run(monkeypatch, measure, tmp_path, command) == code
    assert all(file.stat().st_size for file in files_in(tmp_path).values())
    first, *more = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{command}: the table could not be printed: ")
    assert more == [f"{command}: interrupted"] * (code == INTERRUPTED)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_python_ends_in_peace_when_the_reader_is_gone(stream: str) -> None:
    package = str(Path(purlin_diffusion.__file__).parent)
    program = f"""
import sys
from types import ModuleType

package = sys.modules["purlin_diffusion"] = ModuleType("purlin_diffusion")  # without torch, whose import takes seconds
package.__path__ = [{package!r}]
from purlin_diffusion.commands.streams import say

assert say("a table", sys.{stream}) == "Broken pipe"
"""
    with of_a_reader_that_is_gone() as deaf:
        heard = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: deaf}
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
        done = subprocess.run([sys.executable, "-c", program], env=buffered, timeout=60, check=False, **heard)  # type: ignore[call-overload]
    assert done.returncode == 0 and not done.stdout and not done.stderr


# ---- files
@pytest.mark.parametrize("lost", FILES)
@pytest.mark.parametrize(("measure", "code"), ENDS)
def test_a_file_that_cannot_be_written_costs_no_other(
    measure: Measure,
    code: int,
    lost: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = files_in(tmp_path)

    def meanwhile(*given: Any) -> list[Visits]:
        files[lost].mkdir()
        return measure(*given)

    assert run(monkeypatch, meanwhile, tmp_path) == code
    told = capsys.readouterr()
    line = f"latency: --{lost} {files[lost]} could not be written: Is a directory"
    assert told.err.splitlines() == [line, *["latency: interrupted"] * (code == INTERRUPTED)]
    for name in {*FILES} - {lost}:
        assert files[name].stat().st_size and f": {files[name]}\n" in told.out


def test_what_fails_in_telling_does_not_change_how_a_run_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise IndexError("a defect")

    monkeypatch.setattr(latency, "results", broken)
    assert run(monkeypatch, interrupted, tmp_path) == INTERRUPTED
    first, last = capsys.readouterr().err.splitlines()
    assert first == "latency: what was measured could not be told: IndexError: a defect"
    assert last == "latency: interrupted"


def test_a_run_is_one_in_all_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number in (1, 2):
        assert run(monkeypatch, to_its_end, tmp_path) == DONE
        files = files_in(tmp_path)
        runs = {json.loads(line)["run"] for line in files["record"].read_text().splitlines()}
        assert len(runs) == number and json.loads(files["json"].read_text())["run"] in runs


def test_sizes_that_were_not_reached_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(latency, "measure", interrupted)
    file = tmp_path / "x.html"
    small = [*TINY[: TINY.index("--height")], "--repeats", "1", "--size", "64", "96"]
    assert main(["latency", *small, "--html", str(file)]) == INTERRUPTED
    told = capsys.readouterr().out
    for text in (told, file.read_text().replace("&#x27;", "'")):
        reached, missed = text.split("width=96")
        assert "not reached: the run ended before" in missed and "not reached" not in reached
