"""Compiles kernels, and refuses those that need more stack than a GPU gives a thread.

A kernel that needs more is launched only when the GPU is idle, which it never is while a peer waits for this very kernel. csrc/cuda/launch.hpp
refuses it at set-up; this refuses it where there is no GPU. CMakeLists.txt puts it before nvcc:

    python scripts/within_stack.py nvcc -Xptxas -v ...
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence

MOST_STACK = 1024  # bytes of a thread: cudaLimitStackSize, as CUDA sets it

INFO = re.compile(
    r"^ptxas info\s*: (?:Compiling entry function|Function properties for|Used \d+ registers|\d+ bytes gmem|Compile time)|^\s+\d+ bytes stack frame\b"
)
KERNEL = re.compile(r"Compiling entry function '([^']*)' for '([^']*)'")
STACK = re.compile(r"\b(\d+) bytes cumulative stack size\b")


def main(command: Sequence[str]) -> int:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    lines = done.stderr.splitlines()
    said = [line for line in lines if not INFO.search(line)]
    found = list(too_deep(lines))
    print(*said, *found, sep="\n", end="\n" * bool(said or found), file=sys.stderr)
    return done.returncode or int(bool(found))


def too_deep(lines: Sequence[str]) -> Iterator[str]:
    """What `ptxas -v` says of kernels beyond MOST_STACK."""
    kernel = architecture = ""
    for line in lines:
        if compiling := KERNEL.search(line):
            kernel, architecture = compiling.groups()
        elif (stack := STACK.search(line)) and int(stack[1]) > MOST_STACK:
            yield f"error: {architecture}: {kernel} needs {stack[1]} bytes of stack; a GPU gives a thread {MOST_STACK}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
