"""scripts/within_stack.py lets kernels pass whose stack a GPU gives, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from ptx_lint import nvcc
from within_stack import MOST_STACK

SCRIPT = Path(__file__).resolve().parents[1] / "scripts/within_stack.py"
INFO = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 5 barriers, {} bytes cumulative stack size, 1920 bytes smem
"""


def compiled(*command: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(SCRIPT), *command], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr


def saying(text: str, status: int = 0) -> tuple[int, str]:
    return compiled(sys.executable, "-c", f"import sys; sys.stderr.write({text!r}); sys.exit({status})")


@pytest.mark.parametrize("more", [-1024, 0, 1, 4096])
def test_kernels_that_need_more_than_there_is_are_refused_by_name(more: int) -> None:
    status, said = saying(INFO.format(MOST_STACK + more))
    if more <= 0:
        assert (status, said) == (0, "")
    else:
        assert status == 1 and said.splitlines() == [
            f"error: sm_90a: k needs {MOST_STACK + more} bytes of stack; a GPU gives a thread {MOST_STACK}"
        ]


def test_what_else_the_compiler_says_is_passed_on() -> None:
    assert saying("x.cu(1): warning: odd\n" + INFO.format(8)) == (0, "x.cu(1): warning: odd\n")
    assert saying("x.cu(1): error: worse\n", 2) == (2, "x.cu(1): error: worse\n")


@pytest.mark.skipif(nvcc() is None, reason="nvcc is not on PATH (or set CUDACXX)")
@pytest.mark.parametrize("numbers", [16, 1024])
def test_what_nvcc_says_is_understood(numbers: int, tmp_path: Path) -> None:
    source = tmp_path / "stack.cu"
    source.write_text(
        "__device__ __noinline__ void f(volatile int* x, int n) { for (int i = 0; i < n; ++i) x[i] = i; }\n"
        f"__global__ void k(int* to, int n) {{ volatile int x[{numbers}]; f(x, n); *to = x[n / 2]; }}\n"
    )
    options = ("-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin", "-o", str(tmp_path / "k"))
    status, said = compiled(str(nvcc()), *options, str(source))
    assert (status == 0) == (numbers == 16) and ("bytes of stack" in said) == (numbers != 16), said
