"""Settings of every run: no network, one thread a rank, GPU tests skipped with a reason; no test run is a failure."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal

# Before anything imports torch: ranks share one small machine, and two OpenMP pools on two cores cost seconds. Where two
# threads are asked for, the idle one leaves its core to others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ranks that share a GPU: a hardware queue for every stream, and no kernel that is loaded while another waits for its rank.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import pytest

# A run in the background of a shell ignores Ctrl-C, and so would the ranks whose interrupts are tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_stays() -> None:
    """Half a million objects of torch and diffusers are looked at once, and not again by each collection of a test."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        action="append",
        default=[],
        choices=["gpu"],
        help="fail, instead of skip, tests whose need is not met",
    )
    parser.addoption("--soak", type=int, default=400, help="calls of the random soak on a GPU")
    parser.addoption("--soak-seed", type=int, default=0, help="what they are drawn from")


def _no_gpu() -> str:
    """Why GPU tests cannot run here; empty when they can."""
    if importlib.util.find_spec("purlin_core._cuda") is None:
        return "purlin_core._cuda is not built (no nvcc when `make build` ran)"
    import torch

    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu() if marked else ""
    if reason and "gpu" not in config.getoption("--require"):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _no_gpu()):
        pytest.fail(f"--require gpu: {reason}", pytrace=False)


def _counts(config: pytest.Config) -> dict[str, int]:
    reporter = config.pluginmanager.getplugin("terminalreporter")
    stats = reporter.stats if reporter else {}
    return {outcome: len(stats.get(outcome, [])) for outcome in ("passed", "failed", "error", "skipped")}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run in which every test was skipped, or none was found, proves nothing."""
    counts = _counts(session.config)
    if exitstatus == pytest.ExitCode.OK and counts["passed"] == 0 and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of a run, for people and for programs."""
    if config.pluginmanager.hasplugin("terminalreporter") and not config.option.collectonly:
        counts = _counts(config)
        print(f"{counts['passed']} passed, {counts['failed'] + counts['error']} failed, {counts['skipped']} skipped")
