"""What a user copies runs: the notebook cell by cell, the server behind its HTTP, several nodes as two launchers. On CPU ranks, with the digits."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from purlin_core import PeerError, SetupError, StallError
from purlin_diffusion import RankError, pipelines
from tests.diffusion.launchers import run, torchrun_nodes

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LIMIT = 60.0  # seconds
STEPS = 2


def rank_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("purlin-rank-")}


# ---- the notebook


def cells(file: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    notebook = json.loads(file.read_text())
    assert notebook["nbformat"] == 4
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, text in enumerate(cells(EXAMPLES / "notebook.ipynb"), 1):
        exec(compile(text, f"<cell {number}>", "exec"), names)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {1, 2} and trace["otherData"]["lost"] == 0
    assert isinstance(names["together"], Image.Image) and not rank_threads()


def test_the_notebook_is_committed_without_its_outputs() -> None:
    for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


# ---- the server


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server() -> Iterator[Any]:
    pytest.importorskip("fastapi", reason="the server needs fastapi: pip install fastapi")
    yield load("server")
    sys.modules.pop("example_server", None)


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    """A client of a server that runs, whose one place to wait is taken with the first request."""
    from fastapi.testclient import TestClient

    with TestClient(server.create("digits", ["cpu"] * 2, waiting=2), raise_server_exceptions=False) as client:
        yield client
    assert not rank_threads()


def order(prompt: str = "digit three", **changes: Any) -> dict[str, Any]:
    return {"prompt": prompt, "seed": 5, "steps": STEPS} | changes


def test_a_picture_is_that_of_one_rank(client: Any) -> None:
    answer = client.post("/pictures", json=order())
    assert answer.status_code == 200 and answer.headers["content-type"] == "image/png"
    pipe = pipelines.load("digits")
    pipe.set_progress_bar_config(disable=True)
    arguments = pipelines.defaults("digits") | {"num_inference_steps": STEPS}
    alone = pipe("digit three", generator=torch.Generator().manual_seed(5), **arguments).images[0]
    drawn = Image.open(io.BytesIO(answer.content))
    assert np.abs(np.asarray(drawn, dtype=int) - np.asarray(alone, dtype=int)).max() <= 1
    assert client.get("/health").json() == {
        "ranks": 2,
        "route": "purlin: 2 threads of this process on cpu",
        "pictures": 1,
        "busy": False,
    }


@pytest.mark.parametrize(
    ("wrong", "code", "text"),
    [
        ({"prompt": ""}, 422, "prompt"),
        ({"steps": 0}, 422, "steps"),
        ({"seed": -1}, 422, "seed"),
        ({"height": 7}, 422, "height"),
        ({"prompt": 5}, 422, "prompt"),
    ],
)
def test_a_wrong_order_is_refused_by_name(client: Any, wrong: dict[str, Any], code: int, text: str) -> None:
    answer = client.post("/pictures", json=order(**wrong))
    assert answer.status_code == code and text in answer.text
    assert client.post("/pictures", json=order()).status_code == 200


@pytest.mark.parametrize(
    ("kind", "arguments", "code"),
    [
        (RankError, ("rank 1 of 2 (cpu): MemoryError: no more", 1), 500),
        (StallError, ("rank 0 waited 300 s for rank 1",), 500),
        (PeerError, ("rank 1 left",), 500),
        (SetupError, ("rank 1 did not come",), 500),
        (ValueError, ("`height` has to be divisible by 4",), 400),
    ],
)
def test_an_error_of_the_pipeline_is_a_code_with_its_text(
    server: Any, client: Any, monkeypatch: pytest.MonkeyPatch, kind: Any, arguments: tuple[Any, ...], code: int
) -> None:
    def fails(*_: Any) -> bytes:
        raise kind(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(server.Studio, "draw", fails)
        answer = client.post("/pictures", json=order())
    assert answer.status_code == code and arguments[0] in answer.json()["detail"]
    assert client.post("/pictures", json=order()).status_code == 200


def test_pictures_are_drawn_one_at_a_time_and_few_wait(
    server: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two places and one turn: a third request is told to come again; the two are answered; health answers meanwhile."""
    draw, drawing, go_on = server.Studio.draw, threading.Semaphore(0), threading.Event()
    together: list[int] = []

    def slow(studio: Any, asked: Any) -> bytes:
        drawing.release()
        assert go_on.wait(LIMIT)
        png: bytes = draw(studio, asked)
        together.append(studio.pictures)
        return png

    monkeypatch.setattr(server.Studio, "draw", slow)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.post, "/pictures", json=order(seed=seed)) for seed in range(2)]
        assert all(drawing.acquire(timeout=LIMIT) for _ in range(2))
        refused = client.post("/pictures", json=order())
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        assert client.get("/health").status_code == 200
        go_on.set()
        first, second = (future.result(LIMIT) for future in waiting)
    assert first.status_code == second.status_code == 200 and first.content != second.content
    assert client.get("/health").json()["pictures"] == 2 and len(together) == 2


def test_ctrl_c_ends_the_server_and_its_ranks(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the server needs fastapi: pip install fastapi")
    pytest.importorskip("uvicorn", reason="the server needs uvicorn: pip install uvicorn")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "server.py"), "--port", str(port)]
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert health(port, process)["ranks"] == 2
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.wait()
    assert "Application shutdown complete" in said and process.returncode in (0, -signal.SIGINT, 130), said


def health(port: int, process: subprocess.Popen[str]) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                said: dict[str, Any] = json.loads(answer.read())
                return said
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server did not answer")


# ---- several nodes


def test_several_nodes_split_the_prompts(tmp_path: Path) -> None:
    """Two nodes of two ranks: each prompt is drawn once, by the ranks of one node, as one rank would draw it."""
    prompts = ["digit three", "digit four", "digit five"]
    program = [str(EXAMPLES / "several_nodes.py"), "--steps", str(STEPS), "--out", str(tmp_path), "--prompts", *prompts]
    first, second = run(*torchrun_nodes(2, 2, *program), folder=tmp_path)
    assert "node 0 of 2: 'digit three' on 2 ranks" in first and "'digit five'" in first
    assert "node 1 of 2: 'digit four' on 2 ranks" in second and "node 0" not in second
    pipe = pipelines.load("digits")
    pipe.set_progress_bar_config(disable=True)
    arguments = pipelines.defaults("digits") | {"num_inference_steps": STEPS}
    for number, prompt in enumerate(prompts):
        alone = pipe(prompt, generator=torch.Generator().manual_seed(number), **arguments).images[0]
        drawn = Image.open(tmp_path / f"{number}.png")
        assert np.abs(np.asarray(drawn, dtype=int) - np.asarray(alone, dtype=int)).max() <= 1
