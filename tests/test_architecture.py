"""Who may know whom (CONTRIBUTING.md), checked on the text of the tree; and each rule is shown to catch a breach.

scripts/ pipelines/ purlin_diffusion.commands  ->  purlin_diffusion  ->  purlin_core  ->  csrc
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DIFFUSION_STACK = {"diffusers", "transformers", "accelerate", "peft"}
OURS = {"purlin_core", "purlin_diffusion", "pipelines", "scripts"}


# ---- reading the tree ------------------------------------------------------------------------------------------------
def python_files(root: Path, *folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (root / folder).rglob("*.py"))


def native_files(root: Path) -> list[Path]:
    return sorted(file for file in (root / "csrc").rglob("*") if file.suffix in {".hpp", ".cuh", ".cpp", ".cu"})


@cache
def nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str
    names: tuple[str, ...] = ()

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def under(self, package: str) -> bool:
        """Whether this brings in `package` or something inside it, `from a import b` spelt either way."""
        candidates = [self.module, *(f"{self.module}.{name}" for name in self.names)]
        return any(name == package or name.startswith(package + ".") for name in candidates)


def imports(root: Path, file: Path) -> Iterator[Import]:
    """Every import of a file: anywhere in it, relative ones too, and import_module("name")."""
    package = file.relative_to(root).with_suffix("").parts[:-1]
    for node in nodes(file.read_text()):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield Import(file, node.lineno, module, tuple(alias.name for alias in node.names))
        elif isinstance(node, ast.Call) and re.search(r"\b(import_module|__import__)$", ast.unparse(node.func)):
            yield from (Import(file, node.lineno, str(a.value)) for a in node.args[:1] if isinstance(a, ast.Constant))


def code_of(file: Path) -> str:
    """C++ without its comments, line numbers kept."""
    blank = lambda match: re.sub(r"[^\n]", " ", match.group())  # noqa: E731
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, file.read_text(), flags=re.DOTALL)


def includes(file: Path) -> list[str]:
    return re.findall(r"^\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", code_of(file), flags=re.MULTILINE)


def reach(file: Path) -> set[str]:
    """Names (relative to csrc/purlin) of all our headers that a native file includes, directly or not, and its own."""
    home = next(parent for parent in file.parents if parent.name == "csrc") / "purlin"
    seen: set[Path] = set()
    todo = [file]
    while todo:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        places = [base / name for name in includes(here) for base in (here.parent, home, home.parent)]
        todo += [place.resolve() for place in places if place.is_file()]
    return {path.relative_to(home).as_posix() for path in seen if path.is_relative_to(home)}


def is_atom(name: str) -> bool:
    return name.startswith("atom/") and name != "atom/concept.hpp"


# ---- the rules: each returns its breaches ----------------------------------------------------------------------------
def core_knows_no_diffusion(root: Path) -> Iterator[str]:
    forbidden = DIFFUSION_STACK | (OURS - {"purlin_core"})
    for file in python_files(root, "purlin_core"):
        yield from (f"{file}:{i.line} imports {i.module}" for i in imports(root, file) if i.top in forbidden)


def core_reads_the_environment_in_settings(root: Path) -> Iterator[str]:
    for file in python_files(root, "purlin_core"):
        if file.name != "settings.py" and re.search(r"\bos\.(environ|getenv|putenv)\b", file.read_text()):
            yield f"{file} reads or writes the environment"


def nobody_imports_the_programs(root: Path) -> Iterator[str]:
    programs = ("pipelines", "scripts", "purlin_diffusion.pipelines", "purlin_diffusion.commands")
    for file in python_files(root, "purlin_core", "purlin_diffusion"):
        if "commands" in file.relative_to(root).parts or file.name == "__main__.py":
            continue
        yield from (f"{file}:{i.line} imports {i.module}" for i in imports(root, file) if any(map(i.under, programs)))


def scripts_are_thin(root: Path) -> Iterator[str]:
    """A script of the same name as a command only calls it."""
    for command in python_files(root, "purlin_diffusion/commands"):
        script = root / "scripts" / command.name
        if command.name != "__init__.py" and script.exists() and len(script.read_text().splitlines()) > 15:
            yield f"{script} is more than a call of {command}"


def diffusers_private_names_stay_in_doors(root: Path) -> Iterator[str]:
    """What diffusers defines with a leading underscore: as a module, an imported name, an attribute or its name as text."""
    private = private_names_of_diffusers()
    for file in python_files(root, "purlin_diffusion", "pipelines"):
        if "doors" in {file.stem, file.parent.name}:
            continue
        for i in imports(root, file):
            if i.top in DIFFUSION_STACK and any(re.match(r"_[^_]", part) for part in [*i.module.split("."), *i.names]):
                yield f"{file}:{i.line} imports {i.module} {i.names}"
        for node in nodes(file.read_text()):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            own = isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"self", "cls"}
            if isinstance(name, str) and name in private and not own:
                yield f"{file}:{node.lineno} touches {name}"  # type: ignore[attr-defined]


@cache
def private_names_of_diffusers() -> frozenset[str]:
    """Names with one leading underscore that its source defines or assigns, and accelerate's hook."""
    spec = importlib.util.find_spec("diffusers")
    assert spec is not None
    assert spec.origin is not None
    define = re.compile(r"^[ \t]*(?:def |class |\w+\.)?(_[a-z]\w+)(?: *:[^=\n]+)? *(?:=(?!=)|\()", flags=re.MULTILINE)
    sources = (file.read_text() for file in Path(spec.origin).parent.rglob("*.py"))
    return frozenset({"_hf_hook"}.union(*map(define.findall, sources)) - vars(torch.nn.Module()).keys())


def only_bindings_know_python(root: Path) -> Iterator[str]:
    foreign = re.compile(r"^(Python\.h|(nanobind|pybind11|torch|ATen|c10|numpy)/.*)$")
    for file in native_files(root):
        if file.name != "bindings.cpp":
            yield from (f"{file} includes {name}" for name in includes(file) if foreign.match(name))


def snac_has_no_conditional(root: Path) -> Iterator[str]:
    for file in native_files(root):
        if file.name == "snac.hpp" or file.parent.name == "snac":
            for number, line in enumerate(code_of(file).splitlines(), 1):
                if re.match(r"\s*#\s*(if|ifdef|ifndef|else|elif|endif)\b", line):
                    yield f"{file}:{number} {line.strip()}"


def snac_and_atoms_do_not_meet(root: Path) -> Iterator[str]:
    """Only cpu.cpp, csrc/cuda and the tests may see both."""
    for file in native_files(root):
        names = reach(file)
        atoms = sorted(filter(is_atom, names))
        protocol = sorted(name for name in names if name == "snac.hpp" or name.startswith("snac/"))
        if protocol and atoms and file.name != "cpu.cpp" and file.parent.name != "cuda":
            yield f"{file} sees {protocol[0]} and {', '.join(atoms)}"


def conditionals_and_assembly_have_one_home(root: Path) -> Iterator[str]:
    compiler = re.compile(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*\b(__CUDACC__|__CUDA_ARCH__|__GNUC__|__clang__)\b")
    assembly = re.compile(r"\b(asm|__asm__)\b\s*(volatile|__volatile__)?\s*\(")
    for file in native_files(root):
        for number, line in enumerate(code_of(file).splitlines(), 1):
            if compiler.match(line) and file.name not in {"portable.hpp", "halves.hpp"}:
                yield f"{file}:{number} asks which compiler it is: portable.hpp's business"
            if assembly.search(line) and file.name not in {"ptx.cuh", "portable.hpp"}:
                yield f"{file}:{number} has inline assembly: ptx.cuh's business"


# ---- the tests -------------------------------------------------------------------------------------------------------
Rule = Callable[[Path], Iterator[str]]

# A rule, a file of the tree, and lines that break the rule when they stand in it.
BREACHES: list[tuple[Rule, str, str]] = [
    (core_knows_no_diffusion, "purlin_core/errors.py", "import diffusers"),
    (core_knows_no_diffusion, "purlin_core/errors.py", "def f():\n    from transformers.models import t5"),
    (core_knows_no_diffusion, "purlin_core/errors.py", "from purlin_diffusion import config"),
    (core_knows_no_diffusion, "purlin_core/errors.py", "import importlib\nimportlib.import_module('diffusers.hooks')"),
    (core_reads_the_environment_in_settings, "purlin_core/errors.py", "import os\nHOME = os.environ['HOME']"),
    (nobody_imports_the_programs, "purlin_diffusion/__init__.py", "from . import pipelines"),
    (nobody_imports_the_programs, "purlin_diffusion/__init__.py", "from .commands.doctor import run"),
    (nobody_imports_the_programs, "purlin_core/errors.py", "import scripts.train_digits"),
    (scripts_are_thin, "scripts/doctor.py", "x = 1\n" * 20),
    (
        diffusers_private_names_stay_in_doors,
        "purlin_diffusion/__init__.py",
        "from diffusers.models import _modeling_parallel",
    ),
    (diffusers_private_names_stay_in_doors, "purlin_diffusion/__init__.py", "def f(m):\n    return m._diffusers_hook"),
    (
        diffusers_private_names_stay_in_doors,
        "purlin_diffusion/__init__.py",
        "def f(m):\n    return getattr(m, '_cp_plan')",
    ),
    (only_bindings_know_python, "csrc/purlin/moves.hpp", "#include <Python.h>"),
    (only_bindings_know_python, "csrc/purlin/moves.hpp", "#include <torch/extension.h>"),
    (only_bindings_know_python, "csrc/purlin/moves.hpp", '#include "nanobind/nanobind.h"'),
    (snac_has_no_conditional, "csrc/purlin/snac.hpp", "#if defined(__CUDACC__)\n#endif"),
    (snac_has_no_conditional, "csrc/purlin/snac/ring.hpp", "#ifdef NDEBUG\n#endif"),
    (snac_and_atoms_do_not_meet, "csrc/purlin/snac/ring.hpp", '#include "../atom/planted.hpp"'),
    (snac_and_atoms_do_not_meet, "csrc/purlin/snac.hpp", '#include "atom/planted.hpp"'),
    (snac_and_atoms_do_not_meet, "csrc/purlin/atom/planted.hpp", '#include "../snac.hpp"'),
    (snac_and_atoms_do_not_meet, "csrc/bindings.cpp", '#include "purlin/snac.hpp"\n#include "purlin/atom/planted.hpp"'),
    (conditionals_and_assembly_have_one_home, "csrc/purlin/moves.hpp", "#ifdef __CUDACC__\n#endif"),
    (conditionals_and_assembly_have_one_home, "csrc/purlin/moves.hpp", 'inline void f() { asm volatile("pause"); }'),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in BREACHES))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: Rule) -> None:
    assert not list(rule(ROOT))


def test_the_rules_have_something_to_look_at() -> None:
    assert len(python_files(ROOT, "purlin_core")) > 3
    assert len(python_files(ROOT, "purlin_diffusion")) > 3
    assert {"snac.hpp", "portable.hpp"} <= reach(ROOT / "csrc/purlin/snac.hpp")
    assert any(is_atom(name) for name in reach(ROOT / "csrc/cpu.cpp"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for folder in ("csrc", *sorted(OURS)):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    (root / "csrc/purlin/atom/planted.hpp").write_text("#pragma once\n")
    return root


@pytest.mark.parametrize(("rule", "place", "lines"), BREACHES)
def test_a_breach_is_caught(rule: Rule, place: str, lines: str, copy: Path) -> None:
    file = copy / place
    text = file.read_text() if file.exists() else ""
    before = len(list(rule(copy)))
    file.write_text(f"{lines}\n{text.replace('from __future__ import annotations', '')}")
    try:
        assert len(list(rule(copy))) > before
    finally:
        file.write_text(text)
