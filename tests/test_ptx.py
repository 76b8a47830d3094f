"""scripts/ptx_lint.py finds nothing in the PTX of our kernels, and each of its rules finds a breach."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from ptx_lint import KERNELS, MOST_ARGUMENTS, compiled, findings, functions, nvcc

needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="nvcc is not on PATH (or set CUDACXX)")

RELEASE = "st.release.sys.global.u64 [%rd1], %rd2;"
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], %r2;"
BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], %r2, [%r3];"
COMMIT, STORED, LEFT = (f"cp.async.bulk.{end};" for end in ("commit_group", "wait_group 0", "wait_group.read 0"))
ACQUIRE = "ld.acquire.sys.global.u64 %rd3, [%rd1];"


def kernel(*body: str, parameters: str = ".param .u64 p0") -> str:
    lines = "\n".join(line if line.startswith("$") else f"\t{line}" for line in body)
    return f".version 8.8\n.visible .entry k(\n\t{parameters}\n)\n{{\n{lines}\n\tret;\n\n}}\n"


def rules(ptx: str) -> set[str]:
    return {finding.rule for finding in findings(ptx)}


# ---- our kernels
@needs_nvcc
@pytest.mark.parametrize("file", sorted(KERNELS.glob("*.cu")), ids=lambda file: file.stem)
def test_kernels_keep_the_rules(file: Path) -> None:
    ptx = compiled(file)
    assert any(function.is_kernel for function in functions(ptx))
    assert findings(ptx) == []


@needs_nvcc
def test_wide_lanes_keep_the_rules() -> None:
    """Lanes are wide where PTX knows such vectors: from 8.8 on."""
    ptx = compiled(KERNELS / "direct.cu", arch="compute_100a")
    assert findings(ptx) == []
    (version,) = re.findall(r"^\.version (\d+)\.(\d+)", ptx, re.MULTILINE)
    wide = "ld.global.L1::no_allocate.v4.u64" in ptx and "st.global.v4.u64" in ptx
    assert wide == (tuple(map(int, version)) >= (8, 8))


@needs_nvcc
def test_a_load_through_ldg_is_found(tmp_path: Path) -> None:
    source = tmp_path / "ldg.cu"
    source.write_text("__global__ void k(int* to, const int* from) { *to = __ldg(from); }\n")
    assert rules(compiled(source)) == {"non-coherent load"}


@needs_nvcc
def test_a_load_that_nvcc_takes_for_constant_is_found(tmp_path: Path) -> None:
    source = tmp_path / "restrict.cu"
    source.write_text("__global__ void k(int* __restrict__ to, const int* __restrict__ from) { *to = *from; }\n")
    assert rules(compiled(source)) == {"non-coherent load"}


# ---- rules, one by one
@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("ld.global.nc.u32 %r1, [%rd1];", "non-coherent load"),
        ("@%p1 ld.global.L1::no_allocate.nc.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];", "non-coherent load"),
        ("st.release.gpu.global.u64 [%rd1], %rd2;", "ordering below system scope"),
        ("ld.acquire.gpu.global.u64 %rd2, [%rd1];", "ordering below system scope"),
        ("fence.acq_rel.cta;", "ordering below system scope"),
        ("ld.relaxed.gpu.global.u64 %rd2, [%rd1];", "word without a scope"),
        ("multimem.st.weak.global.u32 [%rd1], %r1;", "multicast"),
    ],
)
def test_a_line_is_forbidden(line: str, rule: str) -> None:
    assert rules(kernel(line)) == {rule}


def test_what_is_allowed_is_not_found() -> None:
    lines = ["ld.global.L1::no_allocate.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];", ACQUIRE, RELEASE, "// ld.global.nc"]
    assert findings(kernel(*lines, "ld.relaxed.sys.global.b128 v, [%rd1];", "membar.sys;")) == []


ON_THEIR_WAY = "bulk stores may be on their way at a release"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ([BULK_STORE, COMMIT, STORED, RELEASE], False),
        ([BULK_STORE, COMMIT, LEFT, STORED, LEFT, RELEASE], False),
        ([RELEASE, BULK_STORE, COMMIT], False),
        ([BULK_STORE, COMMIT, RELEASE], True),
        ([BULK_STORE, COMMIT, LEFT, RELEASE], True),
        ([BULK_STORE, COMMIT, STORED, BULK_STORE, COMMIT, RELEASE], True),
        # one of two ways leads past the wait
        ([BULK_STORE, COMMIT, "@%p1 bra $L__BB0_1;", STORED, "$L__BB0_1:", RELEASE], True),
        ([BULK_STORE, COMMIT, "@%p1 bra $L__BB0_1;", "ret;", "$L__BB0_1:", STORED, RELEASE], False),
        # round a loop
        (["$L__BB0_1:", RELEASE, BULK_STORE, COMMIT, "@%p1 bra $L__BB0_1;"], True),
        (["$L__BB0_1:", RELEASE, BULK_STORE, COMMIT, STORED, "@%p1 bra $L__BB0_1;"], False),
        ([BULK_STORE, COMMIT, "bra.uni $L__BB0_2;", "$L__BB0_1:", RELEASE, "ret;", "$L__BB0_2:", STORED], False),
    ],
)
def test_a_release_waits_for_bulk_stores_on_every_way(body: list[str], found: bool) -> None:
    assert rules(kernel(*body)) == ({ON_THEIR_WAY} if found else set())


def test_bulk_loads_need_an_acquire_and_a_proxy_fence() -> None:
    fence, partial = "fence.proxy.async;", "fence.proxy.async.shared::cta;"
    assert findings(kernel(ACQUIRE, fence, BULK_LOAD)) == []
    assert rules(kernel(fence, BULK_LOAD)) == {"bulk loads without an acquire"}
    assert rules(kernel(ACQUIRE, partial, BULK_LOAD)) == {"bulk loads without a proxy fence"}


def test_arguments_have_a_limit() -> None:
    most = f".param .align 8 .b8 p0[{MOST_ARGUMENTS - 8}],\n\t.param .u64 p1"
    assert findings(kernel(parameters=most)) == []
    assert rules(kernel(parameters=most + ",\n\t.param .u8 p2")) == {"arguments"}


def test_device_functions_are_read_too() -> None:
    function = ".func (.param .b32 out) f(\n\t.param .b64 p0\n)\n{\n\tld.global.nc.u32 %r1, [%rd1];\n\tret;\n\n}\n"
    declared = ".func f\n(\n\t.param .b64 p0\n)\n;\n"
    assert rules(declared + function + kernel(RELEASE)) == {"non-coherent load"}
