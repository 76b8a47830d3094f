"""Runs programs under the launchers that users have, each a process of its own, in bounded time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 100.0  # seconds; a start of four ranks takes 20 on two busy cores
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def torchrun(ranks: int, *program: str) -> list[str]:
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks), *program]


def torchrun_nodes(nodes: int, ranks: int, *program: str) -> list[list[str]]:
    """A launcher a node, all on this machine."""
    where = ["--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [
        [str(BIN / "torchrun"), "--nnodes", str(nodes), "--node-rank", str(n), *where, *program] for n in range(nodes)
    ]


def accelerate_launch(ranks: int, *program: str) -> list[str]:
    """As on GPUs: with --cpu accelerate starts several processes by mpirun alone."""
    chosen = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    port = ["--main_process_port", str(free_port())]
    return [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", str(ranks), *chosen, *port, *program]


def environment(folder: Path) -> dict[str, str]:
    """Of a launcher that runs in `folder`: no launcher has started it, no GPU is there, and its ranks import what this process does."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))}
    return plain | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HOME": str(folder),  # no accelerate configuration of whoever runs this
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
    }


def run(*commands: Sequence[str], folder: Path) -> list[str]:
    """What each of the commands printed, which run side by side in `folder`. Raises AssertionError, with that, when one fails or takes too long."""
    started = [
        subprocess.Popen(
            list(command),
            cwd=folder,
            env=environment(folder),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=LIMIT)[0] for process in started]
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"not done in {LIMIT:g} s: {error.output or b''!r:.3000}") from error
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0, text
    return said
