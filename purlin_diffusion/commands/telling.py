"""How a run's figures are told: its files first, then what a terminal shows. What cannot be told is a line on stderr, and costs nothing else."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from purlin_diffusion.commands.exits import FAILED, told
from purlin_diffusion.commands.files import in_folder
from purlin_diffusion.commands.streams import say
from purlin_diffusion.commands.timing.page import page
from purlin_diffusion.commands.timing.record import append, lines, whole
from purlin_diffusion.commands.timing.rows import Result


@dataclass(frozen=True)
class Output:
    """An option that names a file, what that file holds, and what writes it there."""

    option: str
    holds: str
    write: Callable[[Path, Sequence[Result]], object]


def write_json(file: Path, results: Sequence[Result]) -> None:
    every = [whole(result) for result in results]
    file.write_text(json.dumps(every[0] if len(every) == 1 else every, indent=2) + "\n")


def write_record(file: Path, results: Sequence[Result]) -> None:
    append(file, [line for result in results for line in lines(result)])


OUTPUTS = (
    Output("json", "rows, repeats and the machine", write_json),
    Output("record", "a line a row, appended", write_record),
    Output("html", "plots and pictures", lambda file, results: file.write_text(page(*results))),
)


class Telling:
    """telling(results) writes the files that `args` name and prints screen(results). Raises nothing; `failed`: something could not be told."""

    def __init__(self, command: str, args: argparse.Namespace, screen: Callable[[Sequence[Result]], str]) -> None:
        self._command, self._screen = command, screen
        self._files: dict[Output, Path] = {
            output: file for output in OUTPUTS if (file := getattr(args, output.option, None))
        }
        self.failed = False

    def __call__(self, results: Sequence[Result]) -> None:
        said = list(self._written(results))
        try:
            why = say("\n".join([self._screen(results), *([""] * bool(said)), *said]), sys.stdout)
        except Exception as error:
            why = reason(error)
        if why:
            self._fail(f"the table could not be printed: {why}")

    def _written(self, results: Sequence[Result]) -> Iterator[str]:
        """Each file, and a line that names it."""
        for output, file in self._files.items():
            try:
                output.write(in_folder(file), results)
            except Exception as error:  # the other files are written
                self._fail(f"--{output.option} {file} could not be written: {reason(error)}")
            else:
                yield f"{output.holds}: {file}"

    def _fail(self, text: str) -> None:
        self.failed = True
        told(self._command, text, FAILED)


def reason(error: Exception) -> str:
    """In one line."""
    said = error.strerror if isinstance(error, OSError) else None
    return said or " ".join(f"{type(error).__name__}: {error}".split())
