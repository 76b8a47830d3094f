"""`python -m purlin_diffusion COMMAND`: each is a module of purlin_diffusion.commands, imported when named."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

SUMMARIES = {
    "generate": "draw a picture on several ranks and say what ran",
    "latency": "time one rank against several, and purlin against what one could pick instead",
    "compare": "say in one screen whether it is worth using on this machine",
    "lint": "find what in a model would forbid CUDA graphs, without a GPU",
    "doctor": "say what this machine can do, and the cure for each no",
}


class Command(Protocol):
    """What a module of purlin_diffusion.commands offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Exit code: 0 done, 1 it could not be done, 2 the arguments are wrong."""


def load(name: str) -> Command:
    return cast(Command, importlib.import_module(f"purlin_diffusion.commands.{name}"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. `arguments` defaults to those of the process."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of image processors that nothing here uses
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m purlin_diffusion")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in SUMMARIES.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in given[:1]:
            load(name).add_arguments(command)
    args = parser.parse_args(given)
    return load(args.command).run(args)


if __name__ == "__main__":
    sys.exit(main())
