"""launch() starts ranks, brings back what they return, and ends them all in bounded time whatever one of them does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from purlin_diffusion import LaunchError, RankError, launch

WORK = """
import os, sys, time
import torch
import torch.distributed as dist

def where(word):
    total = torch.ones(1); dist.all_reduce(total)
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    return word, dist.get_rank(), total.item(), torch.get_num_threads(), [os.environ[key] for key in keys]

def one_fails():
    if dist.get_rank() == 1:
        raise ZeroDivisionError("by nought")
    time.sleep(600)

def one_dies():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), 9)
    time.sleep(600)

def launches():
    from purlin_diffusion import launch
    return launch(where, 2, "ash")

def cannot_travel():
    return lambda: None

def draw(folder):
    sys.path.insert(0, folder)
    import conftest
    from purlin_diffusion import ParallelConfig, parallelize
    case = conftest.flux()
    outs = []
    for backend in ("purlin", "torch"):
        handle = parallelize(case.model, ParallelConfig(backend=backend, timeout=60))
        outs.append((handle.rank, handle.route, case.run().numpy()))
        handle.undo()
    return outs

def refused_on_one(folder):
    sys.path.insert(0, folder)
    import conftest
    from purlin_diffusion import RankError, parallelize
    case, said = conftest.flux(), []
    for model in (torch.nn.Linear(2, 2) if dist.get_rank() == 1 else case.model, case.model):
        try:
            handle = parallelize(model)
            said.append(case.run().numpy())
            handle.undo()
        except Exception as error:
            said.append((type(error).__name__, str(error)))
        dist.all_gather_object([None, None], dist.get_rank())  # the next collective finds its peers
    return said
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of functions that new processes can import."""
    (tmp_path / "launched_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "launched_work", raising=False)
    import launched_work

    return launched_work


def test_ranks_form_a_group_and_return_in_order(work: Any) -> None:
    before = dict(os.environ)
    results = launch(work.where, 2, "oak")
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert results == [("oak", r, 2.0, int(threads), [str(r), str(r), "2", threads]) for r in range(2)]
    assert dict(os.environ) == before


LATE = """
import os, time
import torch.distributed as dist

join, joined = dist.init_process_group, []

def join_late(*args, **options):
    join(*args, **options)
    time.sleep(int(os.environ["RANK"]))
    joined.append(time.monotonic())

if "RANK" in os.environ:
    dist.init_process_group = join_late

def begin():
    return joined[0], time.monotonic()
"""


def test_no_rank_begins_before_all_have_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that had ended would close its connections while others still make theirs."""
    (tmp_path / "late_work.py").write_text(LATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import late_work

    joined, began = zip(*launch(late_work.begin, 2), strict=True)
    assert min(began) >= max(joined)


def test_parallelize_finds_its_place_in_a_launched_group(work: Any, tiny: Any) -> None:
    one = tiny("flux").run()
    for rank, outs in enumerate(launch(work.draw, 2, str(Path(__file__).parent))):
        assert [(at, route.partition(":")[0]) for at, route, _ in outs] == [(rank, "purlin"), (rank, "torch")]
        for _, _, out in outs:
            assert abs(out - one.numpy()).max() <= 1e-5


def test_what_one_rank_refuses_all_do_and_the_next_call_works(work: Any, tiny: Any) -> None:
    one = tiny("flux").run()
    (told, drawn), (raised, also) = launch(work.refused_on_one, 2, str(Path(__file__).parent))
    assert raised[0] == "UnsupportedModelError" and "Linear" in raised[1]
    assert told[0] == "RankError" and "rank 1 refused: UnsupportedModelError" in told[1] and "Linear" in told[1]
    assert all(abs(out - one.numpy()).max() <= 1e-5 for out in (drawn, also))


def test_an_exception_comes_back_with_its_rank_and_ends_the_others(work: Any) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2: ZeroDivisionError: by nought[\s\S]*Traceback") as caught:
        launch(work.one_fails, 2)
    assert caught.value.rank == 1 and isinstance(caught.value.__cause__, ZeroDivisionError)
    assert time.monotonic() - began < 45


def test_a_rank_that_dies_is_named(work: Any) -> None:
    with pytest.raises(LaunchError, match="rank 0 of 2 was ended by SIGKILL without a word"):
        launch(work.one_dies, 2)


def test_a_result_that_cannot_travel_is_named(work: Any) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1: .*pickle"):
        launch(work.cannot_travel, 1)


def in_main() -> None:
    """Stands for a function of a notebook."""


def test_what_cannot_be_imported_is_named_with_both_cures(monkeypatch: pytest.MonkeyPatch) -> None:
    def local() -> None: ...

    monkeypatch.setattr(in_main, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "in_main", in_main, raising=False)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    for fn in (local, lambda: None, in_main):
        with pytest.raises(
            LaunchError, match=r"top level of a module and import it; or .*parallelize\(pipe, devices=n\)"
        ):
            launch(fn, 2)


OUT_OF_REACH = """
import functools, sys
from purlin_diffusion import LaunchError, launch

def at_the_top():
    return 7

if __name__ == "__main__":
    def below():
        return 8

    class Callable:
        def __call__(self):
            return 9

    fns = {"top": at_the_top, "partial": functools.partial(at_the_top), "below": below, "object": Callable()}
    try:
        print("returned", launch(fns[sys.argv[1]], 2))
    except LaunchError as error:
        print("refused", error)
"""


def said(program: list[str], **options: Any) -> str:
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, *program]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=100, **options
    )
    assert ran.returncode == 0, ran.stderr
    return next(line for line in ran.stdout.splitlines() if line.startswith(("returned", "refused")))


@pytest.mark.parametrize("name", ["top", "partial"])
def test_a_function_at_the_top_of_a_script_is_within_reach(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OUT_OF_REACH)
    assert said([str(tmp_path / "script.py"), name]) == "returned [7, 7]"


@pytest.mark.parametrize("name", ["below", "object"])
def test_what_only_the_running_script_has_is_named_with_both_cures(name: str, tmp_path: Path) -> None:
    """It can be pickled here, so that it is missing shows in the ranks."""
    (tmp_path / "script.py").write_text(OUT_OF_REACH)
    answer = said([str(tmp_path / "script.py"), name])
    assert answer.startswith("refused launch: rank ") and "AttributeError" in answer
    assert "top level of a module and import it; or " in answer and "parallelize(pipe, devices=n)" in answer


def test_a_program_from_standard_input_is_named_with_both_cures(tmp_path: Path) -> None:
    answer = said(["-", "top"], input=OUT_OF_REACH, cwd=tmp_path)
    assert "this program is no file, but <stdin>" in answer and "parallelize(pipe, devices=n)" in answer


UNGUARDED = """
from purlin_diffusion import LaunchError, launch

def draw(word):
    return word

print("returned", launch(draw, 2, "oak"))
"""
CAUGHT = (
    UNGUARDED.replace("print(", "try:\n    print(")
    + """
except LaunchError as error:
    print("refused", error)
"""
)


def run_unguarded(text: str, folder: Path, *, as_module: bool) -> subprocess.CompletedProcess[str]:
    (folder / "unguarded.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    program = ["-m", "unguarded"] if as_module else ["unguarded.py"]
    return subprocess.run(
        [sys.executable, *program],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_without_a_guard_ends_in_one_error_with_the_cure(as_module: bool, tmp_path: Path) -> None:
    ran = run_unguarded(UNGUARDED, tmp_path, as_module=as_module)
    assert ran.returncode == 1 and not ran.stdout
    last = ran.stderr.strip().splitlines()[-1]
    assert re.match(r"purlin_diffusion\.errors\.LaunchError: launch: rank \d of 2 came to launch\(\) itself", last)
    assert last.endswith('Call launch() under `if __name__ == "__main__":`.')
    assert ran.stderr.count("Traceback") == 1 and "bootstrapping" not in ran.stderr


def test_a_script_without_a_guard_may_catch_that_error(tmp_path: Path) -> None:
    """Once: ranks do not come to believe that they went on."""
    ran = run_unguarded(CAUGHT, tmp_path, as_module=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("refused launch: rank ") and len(ran.stdout.splitlines()) == 1
    assert not ran.stderr


def test_a_rank_launches_nothing(work: Any) -> None:
    with pytest.raises(RankError, match="called inside a rank that launch\\(\\) has started"):
        launch(work.launches, 1)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True])
def test_a_wrong_count_is_named(ranks: Any) -> None:
    with pytest.raises(LaunchError, match="`ranks` needs a count"):
        launch(os.getcwd, ranks)


@pytest.mark.parametrize("ranks", [17, 99, 10**9])
def test_more_ranks_than_can_exchange_are_refused_before_any_starts(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(launch.__globals__, "_start", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(LaunchError, match=f"`ranks` needs at most 16, .*; got {ranks}"):
        launch(os.getcwd, ranks)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, pathlib, time
            from purlin_diffusion import launch

            def sleep():
                pathlib.Path({str(tmp_path)!r}, f"pid{{os.environ['RANK']}}").write_text(str(os.getpid()))
                time.sleep(600)

            if __name__ == "__main__":
                launch(sleep, 2)
            """
        )
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.PIPE
    )
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=30)
    assert time.monotonic() - began < 15 and b"KeyboardInterrupt" in stderr
    assert not any(alive(pid) for pid in pids)
