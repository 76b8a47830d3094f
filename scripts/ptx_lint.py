"""Reads the PTX of the kernels for what the memory model forbids and no test on a GPU is sure to show.

A load marked `.nc` may be served from before the acquire; a release below `.sys` orders nothing for another GPU; a wait
for bulk stores with `.read` waits for their sources only; a bulk load does not see what a plain acquire saw until a
proxy fence; multicast is not used here. The last rule counts a kernel's arguments, which have a limit.

    python scripts/ptx_lint.py [--arch compute_90a] [--jobs 2] [csrc/cuda/FILE.cu or FILE.ptx ...]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "csrc/cuda"
COMPILE = ("-std=c++20", "-O3", "--fmad=false", "--expt-relaxed-constexpr", "-ptx")
MOST_ARGUMENTS = (
    32764  # bytes a kernel may take from sm_70 on: CUDA Programming Guide, "__global__ function parameters"
)


@dataclass(frozen=True)
class Finding:
    line: int  # counted from 1
    rule: str
    text: str


@dataclass(frozen=True)
class Line:
    number: int
    text: str


@dataclass(frozen=True)
class Function:
    """A kernel or a device function; `parameters` is what stands between its name and its body."""

    name: str
    is_kernel: bool
    parameters: tuple[Line, ...]
    body: tuple[Line, ...]


Rule: TypeAlias = Callable[[Function], Iterator[Finding]]


# ---- reading
HEAD = re.compile(r"^(?:\.(?:visible|weak|extern)\s+)*\.(entry|func)\b(?:\s*\([^)]*\))?\s*([\w$]+)")


def functions(ptx: str) -> Iterator[Function]:
    """Those that have a body."""
    lines = [Line(k, line.partition("//")[0].rstrip()) for k, line in enumerate(ptx.splitlines(), 1)]
    head, name, is_kernel = 0, "", False
    k = 0
    while k < len(lines):
        text = lines[k].text
        if found := HEAD.match(text):
            head, name, is_kernel = k, found[2], found[1] == "entry"
        if text.endswith(";") and name and not text.startswith(("{", "\t", " ")):
            name = ""  # only declared
        if text == "{" and name:
            end = next(j for j in range(k, len(lines)) if lines[j].text == "}")
            yield Function(name, is_kernel, tuple(lines[head:k]), tuple(lines[k + 1 : end]))
            name, k = "", end
        k += 1


# ---- rules of a line, or of a few
@dataclass(frozen=True)
class Forbidden:
    rule: str
    pattern: re.Pattern[str]

    def __call__(self, function: Function) -> Iterator[Finding]:
        for line in function.body:
            if self.pattern.search(line.text):
                yield Finding(line.number, self.rule, line.text.strip())


FORBIDDEN = (
    Forbidden("non-coherent load", re.compile(r"\bld(?:\.[\w:]+)*\.nc\b|\bldu\.|\btex\.")),
    Forbidden(
        "ordering below system scope",
        re.compile(r"\b(?:ld|st|atom|red|fence)\.(?:acquire|release|acq_rel|sc)\.(?!sys\b)"),
    ),
    Forbidden("word without a scope", re.compile(r"\b(?:ld|st)\.relaxed\.(?!sys\b)")),
    Forbidden("multicast", re.compile(r"\bmultimem\.|\.multicast\b")),
)


@dataclass(frozen=True)
class Together:
    """Where `one` is, there is `other` too. On which way is not looked at: roles are told apart by branches."""

    rule: str
    one: re.Pattern[str]
    other: re.Pattern[str]

    def __call__(self, function: Function) -> Iterator[Finding]:
        first = next((line for line in function.body if self.one.search(line.text)), None)
        if first and not any(self.other.search(line.text) for line in function.body):
            yield Finding(first.number, self.rule, first.text.strip())


BULK_LOAD = re.compile(r"\bcp\.async\.bulk\.shared\b")
TOGETHER = (
    Together("bulk loads without an acquire", BULK_LOAD, re.compile(r"\bld\.acquire\b")),
    Together(
        "bulk loads without a proxy fence", BULK_LOAD, re.compile(r"\bfence\.proxy\.async(?:\.global)?(?![\w.:])")
    ),
)


def arguments(function: Function) -> Iterator[Finding]:
    """What a kernel takes is at most MOST_ARGUMENTS bytes."""
    if not function.is_kernel:
        return
    sizes = {"8": 1, "16": 2, "32": 4, "64": 8}
    total = 0
    for line in function.parameters:
        for bits, count in re.findall(
            r"\.param\b(?:\s+\.align\s+\d+)?\s+\.[busf](\d+)\s+[\w$]+(?:\[(\d+)\])?", line.text
        ):
            total += sizes[bits] * int(count or 1)
    if total > MOST_ARGUMENTS:
        yield Finding(function.parameters[0].number, "arguments", f"{function.name} takes {total} bytes")


# ---- rules of an order: whatever way control takes
@dataclass(frozen=True)
class Order:
    """On no way through a function may `needs` come after `begins` unless `ends` stands between them."""

    rule: str
    begins: re.Pattern[str]
    ends: re.Pattern[str]
    needs: re.Pattern[str]

    def __call__(self, function: Function) -> Iterator[Finding]:
        blocks = list(basic_blocks(function.body))
        starts = {block.label: k for k, block in enumerate(blocks) if block.label}
        entered = [False] * len(blocks)  # with `begins` open on some way
        work = list(range(len(blocks)))
        while work:
            k = work.pop()
            open_after = self.walk(blocks[k], entered[k])
            for target in (starts[name] if isinstance(name, str) else k + 1 for name in blocks[k].leads_to):
                if open_after and target < len(blocks) and not entered[target]:
                    entered[target] = True
                    work.append(target)
        for block, was_open in zip(blocks, entered, strict=True):
            yield from self.breaches(block, was_open)

    def events(self, block: Block) -> Iterator[tuple[str, Line]]:
        """In the order in which they stand, also within a line."""
        for line in block.lines:
            found = [
                (match.start(), kind)
                for kind, pattern in (("begins", self.begins), ("ends", self.ends), ("needs", self.needs))
                for match in pattern.finditer(line.text)
            ]
            yield from ((kind, line) for _, kind in sorted(found))

    def walk(self, block: Block, is_open: bool) -> bool:
        for kind, _ in self.events(block):
            is_open = kind == "begins" or (is_open and kind != "ends")
        return is_open

    def breaches(self, block: Block, is_open: bool) -> Iterator[Finding]:
        for kind, line in self.events(block):
            if kind == "needs" and is_open:
                yield Finding(line.number, self.rule, line.text.strip())
            is_open = kind == "begins" or (is_open and kind != "ends")


COMPLETE = Order(
    "bulk stores may be on their way at a release",
    begins=re.compile(r"\bcp\.async\.bulk\.(?:global|commit_group)\b"),
    ends=re.compile(r"\bcp\.async\.bulk\.wait_group\b(?!\.read)"),
    needs=re.compile(r"\bst\.release\b"),
)
RULES: tuple[Rule, ...] = (*FORBIDDEN, *TOGETHER, arguments, COMPLETE)


@dataclass(frozen=True)
class Block:
    """Lines that run one after another. `leads_to`: labels, and None for what stands next."""

    label: str
    lines: tuple[Line, ...]
    leads_to: tuple[str | None, ...]


LABEL = re.compile(r"^\s*(\$[\w$]+):")
BRANCH = re.compile(r"^\s*(@!?%\w+\s+)?(?:bra(?:\.uni)?\s+(\$[\w$]+)|(ret|exit|trap)\b)")
TABLE = re.compile(r"^\s*(?:@!?%\w+\s+)?brx\.idx\b")


def basic_blocks(body: Sequence[Line]) -> Iterator[Block]:
    anywhere = tuple(found[1] for line in body if (found := LABEL.match(line.text)))
    label, lines = "", list[Line]()
    for line in body:
        if found := LABEL.match(line.text):
            yield Block(label, tuple(lines), (None,))
            label, lines = found[1], []
        lines.append(line)
        leads_to: tuple[str | None, ...] = ()
        if branch := BRANCH.match(line.text):
            leads_to = (*([branch[2]] if branch[2] else []), *([None] if branch[1] else []))
        elif TABLE.match(line.text):
            leads_to = (*anywhere, None)
        else:
            continue
        yield Block(label, tuple(lines), leads_to)
        label, lines = "", []
    yield Block(label, tuple(lines), ())


def findings(ptx: str) -> list[Finding]:
    return sorted(
        (finding for function in functions(ptx) for rule in RULES for finding in rule(function)),
        key=lambda finding: finding.line,
    )


# ---- compiling
def nvcc() -> str | None:
    """Where it is: named by CUDACXX, on PATH, or where CUDA installs it."""
    return os.environ.get("CUDACXX") or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def compiled(source: Path, arch: str = "compute_90a", root: Path = ROOT) -> str:
    """PTX of a .cu file. Raises RuntimeError with nvcc's complaint."""
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("nvcc is not on PATH; set CUDACXX")
    with tempfile.TemporaryDirectory(prefix="ptx-") as folder:
        out = Path(folder) / "kernels.ptx"
        command = [compiler, *COMPILE, f"-arch={arch}", "-I", str(root / "csrc"), str(source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"nvcc does not compile {source}:\n{done.stderr}")
        return out.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description="Look for breaches of the memory model in the PTX of the kernels.")
    parser.add_argument("files", nargs="*", type=Path, help=".cu or .ptx (default: all of csrc/cuda)")
    parser.add_argument("--arch", default="compute_90a", help="what .cu files are compiled for (default compute_90a)")
    parser.add_argument("--jobs", type=int, default=2, help="how many are compiled at once (default 2)")
    args = parser.parse_args()
    files = args.files or sorted(KERNELS.glob("*.cu"))
    with ThreadPoolExecutor(args.jobs) as pool:
        texts = list(pool.map(lambda f: f.read_text() if f.suffix == ".ptx" else compiled(f, args.arch), files))
    total = 0
    for file, ptx in zip(files, texts, strict=True):
        found = findings(ptx)
        total += len(found)
        kernels = sum(function.is_kernel for function in functions(ptx))
        print(f"{file.name}: {kernels} kernels, {len(found)} findings")
        for finding in found:
            print(f"  line {finding.line}: {finding.rule}: {finding.text}")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
