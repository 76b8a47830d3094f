"""Output paths of every command: tried before any rank starts, nothing left behind, folders made with what is written, files named."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from purlin_diffusion.__main__ import main
from purlin_diffusion.commands import generate, latency, telling
from purlin_diffusion.commands.exits import WRONG_INPUT, InputError
from purlin_diffusion.commands.files import check_writable, in_folder

ASKED = [
    ("generate", "--out", "x.png"),
    *((command, name, "x.out") for command in ("latency", "compare") for name in ("--json", "--record", "--html")),
]


@pytest.mark.parametrize(("command", "name", "file"), ASKED)
def test_a_place_that_cannot_be_is_one_line(
    command: str, name: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / file).mkdir()
    for place, why in ((tmp_path / "file" / file, "Not a directory"), (tmp_path / file, "Is a directory")):
        assert main([command, "--model", "tiny:flux", name, str(place)]) == WRONG_INPUT
        assert capsys.readouterr().err == f"{command}: {name} {place} cannot be written: {why}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["file", file])


@pytest.mark.parametrize(("command", "name", "file"), ASKED)
def test_input_that_cannot_be_leaves_nothing_behind(
    command: str, name: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path / file, tmp_path / "new" / "newer" / file):
        assert main([command, "--model", "tiny:flux", "--ranks", "0", name, str(place)]) == WRONG_INPUT
        assert "--ranks needs 1 or more" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_keeps_what_it_holds(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text("as it was")
    check_writable("--json", file)
    assert file.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [file]


def test_names_too_long_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written: File name too long"):
        check_writable("--json", tmp_path / ("x" * 300))


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_refused_and_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for file in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null"), Path("/dev/full")):
        with pytest.raises(InputError, match=f"--json {file} cannot be written: Not a regular file"):
            check_writable("--json", file)


@pytest.mark.parametrize("folder", ["/proc/nowhere", "file"])
def test_a_link_to_what_cannot_be_is_refused(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link.json").symlink_to(tmp_path / folder / "x.json")
    with pytest.raises(InputError, match=r"link\.json cannot be written"):
        check_writable("--json", tmp_path / "link.json")


@pytest.mark.parametrize("name", ["link.json", "link/x.json", "new/../x.json"])
def test_what_is_tried_can_be_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "far" / "x.json")
    (tmp_path / "link").symlink_to(tmp_path / "farther")
    file = tmp_path / name
    check_writable("--json", file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "link.json"]
    in_folder(file).write_text("{}")
    assert file.read_text() == "{}"


def test_folders_are_made_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "newer" / "x.json"
    check_writable("--json", file)
    assert not list(tmp_path.iterdir())
    in_folder(file).write_text("{}")
    in_folder(file).write_text("[]")
    assert file.read_text() == "[]"


def test_latency_names_each_file_that_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, made in (("whole", lambda _: {}), ("lines", lambda _: [{}]), ("page", lambda *_: "a page")):
        monkeypatch.setattr(telling, name, made)
    parser = argparse.ArgumentParser()
    latency.add_arguments(parser)
    results: Any = [object()]

    def told_by(*arguments: str) -> str:
        telling.Telling("latency", parser.parse_args(arguments), lambda _: "a table")(results)
        return capsys.readouterr().out

    assert told_by() == "a table\n"
    files = {name: tmp_path / name / "file" for name in ("json", "record", "html")}
    told = told_by(*(text for name, file in files.items() for text in (f"--{name}", str(file))))
    for file in files.values():
        assert file.read_text().strip()
        assert told.count(f": {file}\n") == 1


@pytest.mark.parametrize("command", ["latency", "compare"])
def test_two_files_of_a_run_are_two(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file, link, hard = tmp_path / "x.out", tmp_path / "link", tmp_path / "hard"
    link.symlink_to(file)
    for one, other in ((file, file), (file, Path("x.out")), (link, Path("new/../x.out"))):
        assert_refused(command, one, other, capsys)
    file.touch()
    hard.hardlink_to(file)
    assert_refused(command, hard, link, capsys)


def assert_refused(command: str, one: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--model", "tiny:flux", "--html", str(one), "--json", str(other)]) == WRONG_INPUT
    assert capsys.readouterr().err == f"{command}: --json and --html need a file each; {other} and {one} are one\n"


@pytest.mark.parametrize("name", ["x.png", "x-2.png", "x-3.png", "x.json"])
def test_every_file_of_a_call_is_tried(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).mkdir()
    asked = ["generate", "--model", "tiny:flux", "--images", "3", "--out", str(tmp_path / "x.png")]
    assert main(asked) == WRONG_INPUT
    assert capsys.readouterr().err == f"generate: --out {tmp_path / name} cannot be written: Is a directory\n"
    generate.check_out(tmp_path / "y.png", 3)
    assert [path.name for path in tmp_path.iterdir()] == [name]
