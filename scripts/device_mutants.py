"""Mutants of the CUDA Atoms: `scripts/mutants.py --device` compiles the kernels with each and runs the soak on a GPU.

The kernels dawdle (tests/cpp/late.cuh), so that what is missing shows. On one GPU much of what a fence or an acquire is
for holds by itself; such mutants may survive the soak, and are shown all the same. Some are seen in the PTX instead.

Objects lie in build/mutants under a hash of all they are made from: `--build` compiles them on a machine without a GPU,
and a later run on one, with that folder carried there, only links.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import ptx_lint
from mutants import (
    COPY_FREE,
    COPY_OUT,
    DIRECT,
    DIRECT_COPY,
    DIRECT_NOTIFY,
    DIRECT_SUMS,
    LENT_ADD,
    LENT_NOTIFY,
    LENT_READY,
    PACKETS,
    RING,
    RING_COPY,
    RING_NOTIFY,
    ROOT,
    RUN_S,
    STAGED,
    Mutant,
    drop,
    pattern,
    run_test,
    stale,
    swap,
)

OBJECTS = ROOT / "build/mutants"
FLAGS = (
    *("-std=c++20", "-O3", "--fmad=false", "--expt-relaxed-constexpr", "-Xcompiler=-ffp-contract=off"),
    *("-gencode", "arch=compute_90a,code=sm_90a"),
)
KERNELS = ("direct", "direct_sums", "endpoint", "packet_sums", "packets", "staged", "staged_sums")
LATE = "tests/cpp/late.cuh"

PTX, RELAY, APART, TOGETHER, AHEAD, BORROW, LINES, CREWS = (
    f"atom/{name}.cuh" for name in ("ptx", "relay", "apart", "together", "ahead", "borrow", "lines", "packets")
)


def soak(*restricted: str, calls: int = 4000) -> tuple[str, ...]:
    return ("device", "--calls", str(calls), "--failures", "1", *restricted)


PACKET = soak("--regime", "packet", "--kind", "copy")
PACKET_SUMS = soak("--regime", "packet", "--kind", "all-reduce")
RINGS = soak("--regime", "staged", "--kind", "copy")
SUMS = soak("--regime", "staged", "--kind", "all-reduce")
GRANTS = soak("--regime", "direct", "--kind", "copy")
LENT = soak("--regime", "direct", "--kind", "all-reduce")
READ = soak("--regime", "direct", "--kind", "reduce")
# Two ranks, for there each lane adds as soon as all have lent; on streams of their own, for a launch of both ends when the last lane has added.
LENT_TO_ONE = soak("--regime", "direct", "--kind", "all-reduce", "--ranks", "2", "--mode", "streams")
COPIES = soak("--kind", "copy", calls=8000)

# fmt: off
MUTANTS = (
    Mutant("notify: no release", PTX, COPIES, (("st.release.sys.global.u64", "st.relaxed.sys.global.u64"),),
                 ("direct", "staged"), may_survive=True),
    Mutant("wait, expect: no acquire", PTX, COPIES,
                 (("ld.acquire.sys.global.u64", "ld.relaxed.sys.global.u64"), ("ld.acquire.sys.global.b128", "ld.relaxed.sys.global.b128")),
                 ("direct", "staged"), may_survive=True, in_ptx=True),
    Mutant("notify: bulk stores have been read, not written", PTX, COPIES,
                 (("cp.async.bulk.wait_group %0;", "cp.async.bulk.wait_group.read %0;"),), ("direct", "staged"), may_survive=True, in_ptx=True),
    Mutant("wait, expect: no proxy fence", RELAY, COPIES, (drop("ptx::fence_proxy();"),), ("direct", "staged"),
                 may_survive=True, in_ptx=True),
    Mutant("relay: a cell is filled again while it is read", RELAY, RINGS, (drop("ptx::bulk_read<unread>();"),), ("staged",),
                 may_survive=True),
    Mutant("relay: nobody copies what stays at home in a block of its own", RELAY, RINGS,
                 (("} else if (role_ == gathers) { play(gather); }", "}"),), ("staged",)),
    Mutant("relay: the last bytes of an item are left out", RELAY, RINGS,
                 (drop("if (whole < hi) copy_past(to, from, whole, hi);"),), ("staged",)),
    Mutant("relay: pieces are cut by where they go, too", RELAY, GRANTS,
                 (("i64 whole = is_even(from, lo, hi) ?", "i64 whole = is_even(to, lo, hi) && is_even(from, lo, hi) ?"),), ("direct",)),
    Mutant("relay: nobody waits for grants", RELAY, GRANTS, (("if (loads_) return Arrival::yes;", "return Arrival::yes;"),), ("direct",)),
    Mutant("ring: no wait for credit", RING, RINGS, ((".empty() ? Mark{} : credit(p, step)", ".empty() ? Mark{} : Mark{}"),), ("staged",)),
    Mutant("ring: one credit too many", RING, RINGS, (("credit_for(sent(p, step), c.geo", "credit_for(sent(p, step) - 1, c.geo"),),
                 ("staged",)),
    Mutant("ring: notify before the copy", RING, RINGS, (swap(RING_COPY, RING_NOTIFY),), ("staged",)),
    Mutant("copy: freed before it is read", STAGED, RINGS, (swap(COPY_OUT, COPY_FREE),), ("staged",)),
    Mutant("packet: no wait for credit", PACKETS, PACKET,
                 (("return Mark{all().mine().freed(p, a.team(), Use::packet), credit_for(all().sent(p), packet_slots)};", "return Mark{};"),),
                 ("packets",)),
    Mutant("packet: one credit too many", PACKETS, PACKET, (("credit_for(all().sent(p), packet", "credit_for(all().sent(p) - 1, packet"),),
                 ("packets",)),
    Mutant("packet: not all lines are looked at", LINES, PACKET,
                 (("all &= !due(u) || number_of(got[u].tag)", "all &= !due(u) || u >= 1 || number_of(got[u].tag)"),
                  ("agreed &= !due(u) || got[u].tag", "agreed &= !due(u) || u >= 1 || got[u].tag")),
                 ("packets",)),
    Mutant("packet sums: taken while what they overwrite is sent", CREWS, PACKET_SUMS, (("come_together(); if (is_dead())", "if (is_dead())"),),
                 ("packet_sums",),
                 may_survive=True),
    Mutant("direct: no wait for the grant", DIRECT, GRANTS, (("a.expect(c.grants * c.peers(), grant", "a.expect(0, grant"),),
                 ("direct",)),
    Mutant("direct: notify before the copy", DIRECT, GRANTS, (swap(DIRECT_COPY, DIRECT_NOTIFY),), ("direct",)),
    Mutant("direct: no wait for the message", DIRECT, GRANTS,
                 (drop("a.expect(c.peers(), ready, {Where::What::message, Use::direct, 0});"),), ("direct",)),
    Mutant("direct: notify while lanes still copy", TOGETHER, GRANTS,
                 (("__syncthreads(); store_marks(n, mark, lane(), ptx::store_release);", "store_marks(n, mark, lane(), ptx::store_release);"),),
                 ("direct",), late="copy"),
    Mutant("direct: what was read ahead for one is sent to all", AHEAD, GRANTS,
                 (("if (from != ahead_ || vectors != vectors_) read", "if (!ahead_) read"),), ("direct",)),
    Mutant("direct sums: no wait for what is lent", DIRECT_SUMS, LENT, (("range.empty() || !lent()) return;", "range.empty()) return;"),),
                 ("direct_sums",)),
    Mutant("direct sums: told before it is summed", DIRECT_SUMS, LENT, (swap(LENT_ADD, LENT_NOTIFY),), ("direct_sums",)),
    Mutant("direct sums: no wait for the sums of others", DIRECT_SUMS, LENT, (drop(LENT_READY),), ("direct_sums",)),
    Mutant("direct sums: no wait for those who read", DIRECT_SUMS, READ, (drop(LENT_READY),), ("direct_sums",)),
    Mutant("lend: no release", PTX, LENT, (("st.release.sys.global.b128", "st.relaxed.sys.global.b128"),), ("direct_sums",), may_survive=True),
    Mutant("lend: while lanes still copy", TOGETHER, LENT,
                 (("__syncthreads(); store_grants(n, line, lane(), ptx::store_line_r", "store_grants(n, line, lane(), ptx::store_line_r"),),
                 ("direct_sums",), late="copy"),
    Mutant("direct sums: notify while lanes still add", TOGETHER, LENT_TO_ONE,
                 (("__syncthreads(); store_marks(n, mark, lane(), ptx::store_release);", "store_marks(n, mark, lane(), ptx::store_release);"),),
                 ("direct_sums",), late="reduce"),
    Mutant("borrow: sent on while lanes still add", BORROW, LENT,
                 (("__syncthreads();  // other lanes have written what this one reads", ""),), ("direct_sums",), late="reduce"),
    Mutant("one exchange in place: no wait for what is sent", STAGED, SUMS, ((" && is_staged(i))", ")"),), ("staged_sums",), late="copy"),
    Mutant("sums: sent on while lanes still add", APART, SUMS, (drop("if (places > 1) ptx::barrier(copier_barrier(), copiers);"),),
                 ("staged_sums",)),
    Mutant("sums: notify while lanes still copy", APART, SUMS, (drop("if (!passes(x_->done + k % gates, k / gates)) return;"),),
                 ("staged_sums",)),
)
# fmt: on


def controls(mutants: Sequence[Mutant]) -> list[Mutant]:
    """Nothing is taken away, and a warp is late all the same: their tests must pass."""
    late = {(m.late, m.kernels, m.caught_by): m for m in mutants if m.late}
    return [replace(m, name=f"none, late before {m.late}, for `{m.name}`", edits=()) for m in late.values()]


# ---- compiling
def compiler() -> str:
    found = ptx_lint.nvcc()
    if found is None:
        sys.exit("mutants: --device needs nvcc; put it on PATH or set CUDACXX")
    return found


@dataclass(frozen=True)
class Tree:
    """Sources with a mutant planted, or with none."""

    folder: Path
    mutant: Mutant | None

    @property
    def flags(self) -> tuple[str, ...]:
        return (*FLAGS, f"-DPURLIN_LATE={self.mutant.late}") if self.mutant and self.mutant.late else FLAGS

    def plant(self) -> None:
        for part in ("csrc", "tests/cpp"):
            shutil.copytree(ROOT / part, self.folder / part)
        if self.mutant is None:
            return
        path = self.folder / "csrc/purlin" / self.mutant.file
        text = path.read_text()
        for old, new in self.mutant.edits:
            text = pattern(old).sub(lambda _, new=new: new, text)  # type: ignore[misc]
        path.write_text(text)

    def object_of(self, source: str, suffix: str = ".o") -> Path:
        """Where its object lies: under a hash of all headers, the source and the flags."""
        places = ("csrc/purlin/**/*.*", "csrc/cuda/*.*h*", "tests/cpp/*.*h*")
        files = [file for place in places for file in self.folder.glob(place)]
        digest = hashlib.sha256("\0".join((*self.flags, source, suffix)).encode())
        for file in sorted({*files, self.folder / source}):
            digest.update(str(file.relative_to(self.folder)).encode() + b"\0" + file.read_bytes() + b"\0")
        return OBJECTS / f"{Path(source).stem}-{digest.hexdigest()[:16]}{suffix}"

    def compile(self, source: str) -> None:
        out = self.object_of(source)
        if not out.exists():
            late = ["-include", LATE] if source.startswith("csrc/cuda") else []
            self.nvcc(*self.flags, "-Icsrc", *late, "-c", source, "-o", str(out))

    def read_ptx(self, source: str) -> None:
        out = self.object_of(source, ".ptx")
        if not out.exists():
            out.write_text(ptx_lint.compiled(self.folder / source, root=self.folder))

    def nvcc(self, *arguments: str) -> None:
        done = subprocess.run([compiler(), *arguments], cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            name = self.mutant.name if self.mutant else "none"
            raise RuntimeError(f"with mutant `{name}` the kernels do not compile:\n{done.stderr}")


SOURCES = ("tests/cpp/device.cu", "csrc/plan.cpp", *(f"csrc/cuda/{kernel}.cu" for kernel in KERNELS))


def sources_of(m: Mutant) -> tuple[str, ...]:
    return tuple(f"csrc/cuda/{kernel}.cu" for kernel in m.kernels)


def build(trees: Sequence[Tree], jobs: int) -> None:
    OBJECTS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        tasks, begun = [], set[Path]()
        for tree in trees:
            tree.plant()
            for source in sources_of(tree.mutant) if tree.mutant else SOURCES:
                if (there := tree.object_of(source)) not in begun:  # two controls may need the same
                    begun.add(there)
                    tasks.append(pool.submit(tree.compile, source))
            if tree.mutant and tree.mutant.in_ptx:
                tasks += [pool.submit(tree.read_ptx, s) for s in sources_of(tree.mutant)]
        for task in tasks:
            task.result()


def link(tree: Tree, base: Tree) -> None:
    mine = sources_of(tree.mutant) if tree.mutant else ()
    objects = [str((tree if source in mine else base).object_of(source)) for source in SOURCES]
    tree.nvcc(*objects, "-o", str(tree.folder / "device"))


# ---- running
@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    soak: str  # how it failed; empty: it did not
    ptx: str  # what the lint found; empty: nothing

    @property
    def is_control(self) -> bool:
        return not self.mutant.edits

    @property
    def is_noticed(self) -> bool:
        return bool(self.soak or self.ptx)

    @property
    def is_bad(self) -> bool:
        if self.is_control:
            return bool(self.soak)
        unseen = self.mutant.in_ptx and not self.ptx
        return unseen or (not self.soak and not self.mutant.may_survive)

    def __str__(self) -> str:
        lint = f"; PTX: {self.ptx}" if self.ptx else "; PTX: NOT SEEN" if self.mutant.in_ptx else ""
        return f"{self.mutant.name:<48}  soak: {(self.soak or self._passed())[:90]}{lint}"

    def _passed(self) -> str:
        if self.is_control:
            return "passes"
        return "survives, as it may on one GPU" if self.mutant.may_survive else "SURVIVES"


def verdicts(trees: Sequence[Tree], base: Tree) -> Iterator[Verdict]:
    """One after another: there is one GPU."""
    for tree in trees:
        m = tree.mutant
        if m is None:
            continue
        link(tree, base)
        how, _ = run_test(m.caught_by, tree.folder)
        yield Verdict(m, how, seen_in_ptx(tree, m))


def seen_in_ptx(tree: Tree, m: Mutant) -> str:
    texts = [tree.object_of(source, ".ptx").read_text() for source in sources_of(m) if m.in_ptx]
    return next((finding.rule for text in texts for finding in ptx_lint.findings(text)), "")


def main(only: str, jobs: int, *, list_only: bool, build_only: bool) -> int:
    chosen = [m for m in MUTANTS if only in m.name or only in m.file]
    if list_only:
        print("\n".join(f"{m.name}  ({m.file}, {' '.join(m.kernels)})" for m in chosen))
        return 0
    if old := list(stale(chosen)):
        print("mutants: these test nothing any more:\n  " + "\n  ".join(old))
        return 1
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        base = Tree(Path(name) / "none", None)
        trees = [Tree(Path(name) / str(k), m) for k, m in enumerate([*controls(chosen), *chosen])]
        try:
            build([base, *trees], jobs)
            if build_only:
                print(f"{len(list(OBJECTS.iterdir()))} objects in {OBJECTS}")
                return 0
            return run(trees, base)
        except RuntimeError as error:
            sys.exit(f"mutants: {error}")


def run(trees: Sequence[Tree], base: Tree) -> int:
    link(base, base)
    done = subprocess.run(
        [str(base.folder / "device"), *soak()[1:]], capture_output=True, text=True, check=False, timeout=RUN_S
    )
    said = done.stdout.strip() or f"exit status {done.returncode}"
    print(f"{'none':<48}  soak: {said if done.returncode else said.splitlines()[-1]}", flush=True)
    if done.returncode != 0:
        return 1
    seen = []
    for verdict in verdicts(trees, base):
        print(verdict, flush=True)
        seen.append(verdict)
    mutants = [verdict for verdict in seen if not verdict.is_control]
    noticed, bad = sum(verdict.is_noticed for verdict in mutants), sum(verdict.is_bad for verdict in mutants)
    failed = sum(verdict.is_bad for verdict in seen if verdict.is_control)
    print(
        f"{noticed} of {len(mutants)} device mutants noticed, {bad} that may not survive did, {failed} controls failed"
    )
    return int(bad + failed > 0)
