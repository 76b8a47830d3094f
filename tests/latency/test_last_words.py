"""A run that is told to end says once what it has measured, whatever its main thread is doing, and ends soon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

import purlin_diffusion
from purlin_diffusion.commands.exits import INTERRUPTED
from purlin_diffusion.commands.last_words import SIGNALS, LastWords
from tests.diffusion.launchers import environment, torchrun
from tests.latency.runs import TINY

LAUNCHERS_SECONDS = 30.0  # until torchrun kills
STUCK = """
import ctypes

def stuck(*_):
    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(lock)
    while True:
        try:
            print("stuck", file=sys.stderr, flush=True)
            libc.pthread_mutex_lock(lock)  # no signal ends it
        except KeyboardInterrupt:  # before it
            pass
"""


@contextmanager
def running(folder: Path, *call: str, until: str) -> Iterator[subprocess.Popen[str]]:
    """A program in a process group of its own, which has said `until` on its error stream."""
    process = subprocess.Popen(
        call,
        cwd=folder,
        env=environment(folder) | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            assert process.stderr is not None
            assert any(until in line for line in process.stderr), process.wait()
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


# ---- a program that speaks
SPEAKER = f"""
import sys
from pathlib import Path
from types import ModuleType

package = sys.modules["purlin_diffusion"] = ModuleType("purlin_diffusion")  # without torch, whose import takes seconds
package.__path__ = [{str(Path(purlin_diffusion.__file__).parent)!r}]
from purlin_diffusion.commands import last_words
{STUCK}
def busy():
    print("busy", file=sys.stderr, flush=True)
    while True:
        pass

def cleaning():
    try:
        busy()
    finally:
        stuck()

def say():
    with Path("said").open("a") as file:
        file.write("once ")
    if doing == "mute":
        stuck()
    print("said", file=sys.stderr, flush=True)

doing, launched, last_words.END_SECONDS = sys.argv[1], sys.argv[2] == "launched", float(sys.argv[3])
with last_words.LastWords("latency", say, launched=launched, cleaned=Path("cleaned").touch):
    dict(busy=busy, mute=busy, stuck=stuck, cleaning=cleaning)[doing]()
"""


def speaker(folder: Path, doing: str, launched: str, seconds: float) -> AbstractContextManager[subprocess.Popen[str]]:
    ready = "stuck" if doing == "stuck" else "busy"
    return running(folder, sys.executable, "-c", SPEAKER, doing, launched, str(seconds), until=ready)


@pytest.mark.parametrize("doing", ["busy", "stuck", "cleaning", "mute"])
@pytest.mark.parametrize(("launched", "number"), [("launched", signal.SIGTERM), ("by hand", signal.SIGINT)])
def test_it_is_said_once_and_is_the_end(doing: str, launched: str, number: signal.Signals, tmp_path: Path) -> None:
    with speaker(tmp_path, doing, launched, 0.5) as process:
        process.send_signal(number)
        code = process.wait(LAUNCHERS_SECONDS)
    assert (tmp_path / "said").read_text() == "once "
    by_itself = (doing, launched) == ("busy", "by hand")  # as Python ends what KeyboardInterrupt has left
    assert code == (-signal.SIGINT if by_itself else INTERRUPTED)
    assert (tmp_path / "cleaned").exists() != by_itself


def test_a_second_signal_does_not_wait_for_the_main_thread(tmp_path: Path) -> None:
    with speaker(tmp_path, "stuck", "by hand", 1000) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None and "said\n" in process.stderr
        while process.poll() is None:  # what comes while it still speaks is the same wish
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
    assert process.returncode == INTERRUPTED and (tmp_path / "said").read_text() == "once "


# ---- in this process
def hearers() -> tuple[object, ...]:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return (descriptor, *map(signal.getsignal, sorted(SIGNALS)))


@pytest.mark.parametrize("number", SIGNALS)
def test_what_is_said_at_the_end_is_said_to_the_end(number: signal.Signals) -> None:
    """A signal that comes meanwhile interrupts nothing, and adds nothing."""
    said: list[str] = []
    before = hearers()
    with LastWords("latency", lambda: said.append("some"), launched=False, cleaned=list) as words:
        assert hearers() != before
        words.say(lambda: (signal.raise_signal(number), said.append("all"))[-1])
    assert said == ["all"] and hearers() == before


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupt_is_said_once_by_either_thread(number: signal.Signals) -> None:
    before = hearers()
    for _ in range(20):
        assert interrupted(number) == ["some"] and hearers() == before


def interrupted(number: signal.Signals) -> list[str]:
    """What a run says that is interrupted at once."""
    said: list[str] = []
    with (
        pytest.raises(KeyboardInterrupt),
        LastWords("latency", lambda: said.append("some"), launched=False, cleaned=list),
    ):
        signal.raise_signal(number)
    return said


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with LastWords("latency", lambda: None, launched=False, cleaned=list):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


# ---- under a launcher
RANK = f"""
import os
import sys
from pathlib import Path
from purlin_diffusion.__main__ import main
from purlin_diffusion.commands import latency
from purlin_diffusion.commands.picture import Seconds
from purlin_diffusion.commands.timing.modes import modes
from purlin_diffusion.commands.timing.visit import Visit, keep, together
{STUCK}
def measure(options, sizes, asked, so_far):
    root = os.environ["RANK"] == "0"
    Path("pid" + os.environ["RANK"]).write_text(str(os.getpid()))
    together(options, 0)
    if root:
        visits = [Visit(mode, Seconds(1.0, (0.5,))) for mode in modes(options, asked)]
        keep([[visits, visits]], so_far)
        print("kept", file=sys.stderr, flush=True)
    if root and sys.argv[1] == "together":
        together(options, 0)
    stuck()

latency.measure = measure
sys.exit(main(["latency", *sys.argv[2:]]))
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("doing", ["together", "stuck"])
def test_a_launchers_root_tells_what_was_measured(doing: str, tmp_path: Path) -> None:
    """Ctrl-C for the launcher alone, where its root waits for a rank that does not come; the death of a rank of which its root does not hear."""
    program, file = tmp_path / "rank.py", tmp_path / "run.jsonl"
    program.write_text(RANK)
    call = [str(program), doing, *TINY, "--record", str(file)]
    with running(tmp_path, *torchrun(2, *call), until="kept") as launcher:
        began = time.monotonic()
        if doing == "together":
            launcher.send_signal(signal.SIGINT)
        else:
            os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
        said, _ = launcher.communicate(timeout=2 * LAUNCHERS_SECONDS)
        assert time.monotonic() - began < LAUNCHERS_SECONDS
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["total_s"] for line in lines if line["mode"] == "ours"} == {1.0}
    assert said.count("\n| ours |") == 1
    left = list(tmp_path.glob("purlin-latency-*"))
    assert len(left) == (doing == "stuck")  # of the rank that was killed
