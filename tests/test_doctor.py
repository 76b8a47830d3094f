"""The doctor names the first thing in the way, and its exit code is that of the CPU path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from purlin_diffusion.commands import doctor
from purlin_diffusion.commands.doctor import Finding

CPU_FINDINGS = [Finding("purlin_core._cpu", True, ""), Finding("memfd", True, "")]
TWO_GPUS = [
    *CPU_FINDINGS,
    Finding("purlin_core._cuda", True, ""),
    Finding("NVIDIA driver", True, ""),
    Finding("purlin on GPUs", True, ""),
    Finding("P2P", True, ""),
    Finding("GPU 0", True, ""),
    Finding("GPU 1", True, ""),
]
ONE_GPU = [finding for finding in TWO_GPUS if finding.name not in ("P2P", "GPU 1")]


def without(findings: list[Finding], name: str) -> list[Finding]:
    return [Finding(f.name, f.good and f.name != name, f.seen) for f in findings]


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "purlin_diffusion", *arguments]
    return subprocess.run(call, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)


def test_json_and_screen_say_the_same_and_the_cpu_path_works(capsys: pytest.CaptureFixture[str]) -> None:
    findings = doctor.examine()
    parser = doctor.argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args(["--json"])) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is True
    assert [f["name"] for f in told["findings"]] == [f.name for f in findings]
    assert doctor.run(parser.parse_args([])) == 0
    screen = capsys.readouterr().out
    assert all(f.name in screen and f.seen in screen for f in findings)
    assert len(screen.splitlines()) <= 40


def test_every_no_has_a_cure() -> None:
    assert not [f.name for f in doctor.examine() if f.good is False and not f.cure]


@pytest.mark.parametrize("name", ["purlin_core._cpu", "memfd"])
def test_health_is_that_of_the_cpu_path(name: str) -> None:
    findings = [Finding("GPU 0", False, ""), *(Finding(f.name, True, "", needed=True) for f in CPU_FINDINGS)]
    assert doctor.healthy(findings)
    assert not doctor.healthy([Finding(f.name, f.name != name, "", needed=f.needed) for f in findings])
    assert "none" in doctor.backend(without(CPU_FINDINGS, name)).seen


def test_the_backend_is_purlin_only_when_nothing_is_in_its_way() -> None:
    assert doctor.backend(CPU_FINDINGS).seen == "purlin on CPU ranks"
    assert doctor.backend(TWO_GPUS).seen.startswith("purlin on 2 GPUs")
    assert doctor.backend(ONE_GPU).seen.startswith("purlin on 1 GPU, for ranks that share it")
    for findings, instead in ((TWO_GPUS, "torch (NCCL) on 2 GPUs"), (ONE_GPU, "one rank on 1 GPU")):
        for name in (finding.name for finding in findings if finding not in CPU_FINDINGS):
            choice = doctor.backend(without(findings, name))
            assert choice.good is False
            assert choice.seen.startswith(instead) and name in choice.seen


@pytest.mark.parametrize(
    ("driver", "status", "built_for", "good", "says"),
    [
        ("", None, None, False, "none loaded"),
        ("", doctor.DRIVER_TOO_OLD, "13.0", False, "none loaded"),
        ("570.86.10", 0, "13.0", False, "too old for CUDA 13"),
        ("570.86.10", 0, "12.8", True, "570.86.10"),
        ("580.65.06", 0, "13.0", True, "580.65.06"),
        ("580.65.06", doctor.DRIVER_TOO_OLD, "13.0", False, "too old"),
        ("580.65.06", doctor.NO_DEVICE, "13.0", False, "shows no device"),
    ],
)
def test_an_old_driver_is_told_from_no_driver_and_no_gpu(
    driver: str, status: int | None, built_for: str | None, good: bool, says: str
) -> None:
    finding = doctor.driver_finding(driver, status, built_for)
    assert finding.good is good
    assert says in finding.seen
    assert good or finding.cure


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version: 12.2.0", "580.65.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build", "570.124.06"),
        ("nothing of the kind", ""),
    ],
)
def test_driver_version_is_read_from_the_kernel(
    text: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "DRIVER_FILE", tmp_path / "version")
    assert doctor.driver_version() == ""
    (tmp_path / "version").write_text(text)
    assert doctor.driver_version() == version


def test_links_are_read_from_the_topology_matrix() -> None:
    text = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tPHB\tSYS\t0-31\n"
        "GPU1\tNV18\t X \tPHB\tSYS\t0-31\n"
        "GPU2\tPHB\tPHB\t X \tSYS\t0-31\n\nLegend:\n  X = Self\n"
    )
    links = doctor.link_names(text, 3)
    assert links[0, 1] == links[1, 0] == "NV18"
    assert links[0, 2] == links[2, 1] == "PHB"
    assert len(links) == 6


def test_who_reaches_whom_is_a_row_a_gpu_and_one_line_for_all() -> None:
    pairs = {(i, j): True for i in range(3) for j in range(3) if i != j}
    links = dict.fromkeys(pairs, "NV18")
    assert doctor.reach_text(1, pairs, links) == "; reaches 0 (NV18), 2 (NV18)"
    assert doctor.peers_finding(pairs, links).seen == "all 3 pairs (NV18)"
    apart = {**pairs, (0, 2): False}
    assert doctor.reach_text(0, apart, {}) == "; reaches 1 (link unknown)"
    finding = doctor.peers_finding(apart, links)
    assert finding.good is False and finding.seen == "no access 0-2" and finding.cure


def test_a_version_outside_our_range_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "required_ranges", lambda: {"diffusers": "<0.1"})
    found = {f.name: f for f in doctor.packages()}
    assert found["diffusers"].good is False and "<0.1" in found["diffusers"].cure
    assert found["torch"].good is True


@pytest.mark.parametrize("arguments", [(), ("paint",), ("generate", "--ranks", "two")])
def test_wrong_arguments_exit_with_2_and_name_what_there_is(arguments: tuple[str, ...]) -> None:
    result = command(*arguments)
    assert result.returncode == 2
    assert "usage:" in result.stderr
    assert "Traceback" not in result.stderr


def test_scripts_are_the_commands() -> None:
    scripts = Path(__file__).resolve().parent.parent / "scripts"
    environment = {**os.environ, "PYTHONPATH": str(scripts.parent)}
    result = subprocess.run(
        [sys.executable, str(scripts / "doctor.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert "--json" in result.stdout
