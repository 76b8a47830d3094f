"""What this machine can do, on one screen, and the cure for each no.

Every probe is a small function that returns findings and raises nothing. The CPU path decides the exit code: a machine
without a GPU is well.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# Oldest driver that runs a CUDA runtime of this major version (CUDA release notes, "minor version compatibility").
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
OLDEST_CAPABILITY = (8, 0)
NO_DEVICE, DRIVER_TOO_OLD = 100, 35  # cudaErrorNoDevice, cudaErrorInsufficientDriver
DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """One line: what was asked, whether the answer is good (None: neither), what was seen, and the cure for a no."""

    name: str
    good: bool | None
    seen: str
    cure: str = ""
    needed: bool = False  # the CPU path cannot do without it

    def line(self) -> str:
        mark = {True: "yes", False: "NO" if self.needed else "no", None: ""}[self.good]
        cure = f"\n{'':20}     -> {self.cure}" if self.cure and not self.good else ""
        return f"{self.name:<20} {mark:<3}  {self.seen}{cure}"


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    capability: tuple[int, int]
    memory_gib: float


# ---- probes ----------------------------------------------------------------------------------------------------------
def machine() -> Iterator[Finding]:
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "") if Path("/etc/os-release").exists() else ""
    linux = sys.platform == "linux"
    yield Finding("python", None, f"{platform.python_version()} ({sys.executable})")
    yield Finding(
        "system", linux, f"{system or platform.system()}, {platform.machine()}", "purlin needs Linux", needed=True
    )
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding("cores, memory", None, f"{len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB")


def packages() -> Iterator[Finding]:
    """The versions of what we stand on, against the ranges of our own metadata."""
    ranges = required_ranges()
    for name in ("torch", "diffusers", "transformers", "accelerate"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, False, "not installed", f"pip install '{name}{ranges.get(name, '')}'", needed=True)
            continue
        fits = in_range(version, ranges.get(name, ""))
        yield Finding(name, fits, version, f"tested with {ranges.get(name)}: pip install '{name}{ranges.get(name)}'")


def required_ranges() -> dict[str, str]:
    try:
        lines = importlib.metadata.requires("purlin-diffusion") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    split = (re.match(r"([A-Za-z0-9_.-]+)\s*([^;]*)$", line.strip()) for line in lines)
    return {match[1]: match[2].strip() for match in split if match}


def in_range(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(version, prereleases=True)


def modules() -> Iterator[Finding]:
    why = import_error("purlin_core._cpu")
    cure = "pip install purlin-diffusion, or `make build` in a checkout; a C++20 compiler is needed"
    yield Finding("purlin_core._cpu", not why, why or "built: ranks on this CPU", cure, needed=True)
    why = import_error("purlin_core._cuda")
    cure = "build it where nvcc 12.8 or newer is: PURLIN_CUDA=ON pip install ."
    yield Finding("purlin_core._cuda", not why, why or f"built for {built_for()}", cure)


def built_for() -> str:
    """The GPUs that the CUDA module here has code for, as CMake was told; `virtual` is PTX, which the driver compiles."""
    names: str = importlib.import_module("purlin_core._cuda").built_for
    return names


def import_error(module: str) -> str:
    """Why `module` does not import; empty when it does."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return "not built" if error.name and error.name.startswith(module.partition(".")[0]) else str(error)
    except ImportError as error:
        return first_line(error)
    return ""


def shared_memory() -> Iterator[Finding]:
    why = memfd_error()
    yield Finding("memfd", not why, why or "works: ranks in processes share memory that nothing can leave behind",
                  "a kernel >= 3.17 that allows memfd_create; until then --threads", needed=True)  # fmt: skip
    if Path("/dev/shm").is_dir():
        status = os.statvfs("/dev/shm")
        mib = status.f_frsize * status.f_blocks / 2**20
        yield Finding("/dev/shm", None, f"{mib:.0f} MiB (purlin uses none of it; torch's data loaders do)")


def memfd_error() -> str:
    try:
        descriptor = os.memfd_create("purlin-doctor")
    except (AttributeError, OSError) as error:
        return first_line(error)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as page:
            page[:6] = b"purlin"
    except OSError as error:
        return first_line(error)
    finally:
        os.close(descriptor)
    return ""


def cuda() -> Iterator[Finding]:
    """Driver, torch's CUDA and the devices, so that the first thing in the way is named."""
    import torch

    driver = driver_version()
    built_for = torch.version.cuda
    count = torch.cuda.device_count() if built_for else 0
    yield driver_finding(driver, driver_status(), built_for)
    cure = "install a CUDA build of torch" if driver else "none needed without an NVIDIA GPU"
    yield Finding("torch's CUDA", bool(built_for), built_for or f"{torch.__version__} is a CPU build", cure)
    gpus = [gpu(index) for index in range(count)]
    if built_for and driver and not gpus:
        yield Finding(
            "GPUs", False, "torch sees none", "check CUDA_VISIBLE_DEVICES, or a container started without GPUs"
        )
    reach = peers(count)
    links = link_names(command_output("nvidia-smi", "topo", "-m"), count) if count > 1 else {}
    for each in gpus:
        major, minor = each.capability
        seen = f"{each.name}, sm_{major}{minor}, {each.memory_gib:.0f} GiB{reach_text(each.index, reach, links)}"
        yield Finding(
            f"GPU {each.index}", each.capability >= OLDEST_CAPABILITY, seen, "purlin needs sm_80 (Ampere) or newer"
        )
    if count > 1:
        yield peers_finding(reach, links)
    if gpus and not import_error("purlin_core._cuda"):
        why = cuda_module_error(count)
        cure = "driver 580 or newer for a module of CUDA 13, or build it with the CUDA of this driver"
        yield Finding("purlin on GPUs", not why, why or "purlin_core._cuda has memory on each", cure)


def driver_finding(driver: str, status: int | None, built_for: str | None) -> Finding:
    """Tells a driver that is too old from no driver and no GPU: the CUDA runtime answers 35 to the first two."""
    if not driver:
        return Finding(
            "NVIDIA driver",
            False,
            "none loaded",
            "with an NVIDIA GPU: install its driver, 580 or newer; else none needed",
        )
    major = int((built_for or "13").partition(".")[0])
    oldest = OLDEST_DRIVER.get(major, max(OLDEST_DRIVER.values()))
    if int(driver.partition(".")[0]) < oldest or status == DRIVER_TOO_OLD:
        return Finding("NVIDIA driver", False, f"{driver} is too old for CUDA {major} (a GPU may well be there)",
                       f"driver {oldest} or newer, or builds of torch and purlin for an older CUDA")  # fmt: skip
    if status == NO_DEVICE:
        return Finding(
            "NVIDIA driver",
            False,
            f"{driver}, but it shows no device",
            "CUDA_VISIBLE_DEVICES, or give the container its GPUs",
        )
    return Finding("NVIDIA driver", True, f"{driver} (CUDA {major} needs {oldest})")


def driver_version() -> str:
    """Of the loaded kernel module, e.g. "580.65.06"; empty without one. The first number with a dot in the file."""
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", DRIVER_FILE.read_text()) if DRIVER_FILE.exists() else None
    return found[1] if found else ""


def driver_status() -> int | None:
    """What cuInit says; None without libcuda."""
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except OSError:
        return None


def gpu(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return Gpu(index, properties.name, (properties.major, properties.minor), properties.total_memory / 2**30)


def cuda_module_error(count: int) -> str:
    """Why purlin_core._cuda cannot use one of `count` GPUs, in CUDA's words; empty when it has memory on each. Its CUDA is not torch's."""
    import torch

    try:
        native = importlib.import_module("purlin_core._cuda")
        for index in range(count):
            with torch.cuda.device(index):
                native.Memory(4096)
    except Exception as error:
        return first_line(error)
    return ""


def peers(count: int) -> dict[tuple[int, int], bool]:
    """Whether GPU i reaches the memory of GPU j, by (i, j)."""
    import torch

    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    return {(i, j): torch.cuda.can_device_access_peer(i, j) for i, j in pairs}


def reach_text(index: int, reach: dict[tuple[int, int], bool], links: dict[tuple[int, int], str]) -> str:
    """One row of the matrix of P2P."""
    row = [f"{j} ({links.get((i, j), 'link unknown')})" for (i, j), yes in reach.items() if i == index and yes]
    return f"; reaches {', '.join(row)}" if row else ""


def peers_finding(reach: dict[tuple[int, int], bool], links: dict[tuple[int, int], str]) -> Finding:
    without = [f"{i}-{j}" for (i, j), yes in reach.items() if not yes]
    names = ", ".join(sorted(set(links.values()))) or "link unknown"
    seen = f"no access {', '.join(without)}" if without else f"all {len(reach) // 2} pairs ({names})"
    cure = "GPUs under one NVLink switch or bridge; in a VM or container, P2P allowed and IOMMU/ACS off"
    return Finding("P2P", not without, seen, cure)


def link_names(topology: str, count: int) -> dict[tuple[int, int], str]:
    """{(i, j): "NV18" | "PHB" | ...} from the matrix of `nvidia-smi topo -m`."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    return {
        (i, j): row[1 + j] for i, row in enumerate(rows[:count]) for j in range(count) if i != j and len(row) > 1 + j
    }


def tools() -> Iterator[Finding]:
    nvcc = re.search(r"release ([\d.]+)", command_output("nvcc", "--version"))
    yield Finding("nvcc", bool(nvcc), nvcc[1] if nvcc else "not on PATH", "only needed to build purlin_core._cuda")
    why = xformers_error()
    yield Finding(
        "xformers", not why, why or "its attention operator runs", "optional; torch's own attention is used instead"
    )


def xformers_error() -> str:
    """Why its attention cannot be used here; empty when a small call of it worked. Its import proves nothing."""
    if importlib.util.find_spec("xformers") is None:
        return "not installed"
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        operator = importlib.import_module("xformers.ops").memory_efficient_attention
        query = torch.ones(1, 8, 1, 16, device=device, dtype=torch.float16 if device == "cuda" else torch.float32)
        operator(query, query, query)
    except Exception as error:
        return f"installed, but its operator does not run on this {device}: {first_line(error)}"
    return ""


def backend(findings: Iterable[Finding]) -> Finding:
    """What parallelize does on this machine with backend="auto", from what was found."""
    good = {finding.name: finding.good for finding in findings}
    gpus = [name for name in good if name.startswith("GPU ")]
    if not gpus:
        works = bool(good["purlin_core._cpu"] and good["memfd"])
        return Finding(
            "parallelize", works, "purlin on CPU ranks" if works else "none", "see the lines marked NO", needed=True
        )
    wanted = ["purlin_core._cuda", "NVIDIA driver", "purlin on GPUs", *gpus, *(["P2P"] if len(gpus) > 1 else [])]
    missing = ", ".join(name for name in wanted if not good.get(name))
    if missing and len(gpus) > 1:
        return Finding(
            "parallelize", False, f"torch (NCCL) on {len(gpus)} GPUs, because of: {missing}", "see those lines"
        )
    if missing:
        return Finding(
            "parallelize", False, f"one rank on 1 GPU, no ranks that share it, because of: {missing}", "see those lines"
        )
    if len(gpus) > 1:
        return Finding(
            "parallelize", True, f"purlin on {len(gpus)} GPUs, as threads (devices={len(gpus)}) or processes"
        )
    return Finding("parallelize", True, "purlin on 1 GPU, for ranks that share it: devices=['cuda:0', 'cuda:0']")


# ---- telling ---------------------------------------------------------------------------------------------------------
def command_output(*command: str) -> str:
    if not shutil.which(command[0]):
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def examine() -> list[Finding]:
    findings = [*machine(), *packages(), *modules(), *shared_memory()]
    if any(finding.name == "torch" and finding.seen != "not installed" for finding in findings):
        findings += [*cuda(), *tools()]
    return [*findings, backend(findings)]


def healthy(findings: Iterable[Finding]) -> bool:
    """Whether the CPU path works."""
    return all(finding.good is not False for finding in findings if finding.needed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """0 when at least the CPU path works, else 1."""
    findings = examine()
    if args.json:
        print(
            json.dumps({"healthy": healthy(findings), "findings": [asdict(finding) for finding in findings]}, indent=2)
        )
    else:
        print("\n".join(finding.line() for finding in findings))
    return 0 if healthy(findings) else 1
