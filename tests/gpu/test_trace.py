"""On a GPU a trace holds each call as the host saw it and, by events around it, as the GPU did; and it says that kernels look at no clock."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import purlin_core
from purlin_core import Communicator
from tests.gpu.devices import WORLDS, captured, gpu_world, settled

pytestmark = pytest.mark.gpu

LONG = 20_000_000  # cycles: some 10 ms
CALLS = 3


def total(comm: Communicator) -> torch.Tensor:
    return comm.redistribute(torch.ones(5000, device=comm.device), "n@ -> n")


def tracks(path: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Slices by (process, track), in order."""
    written = json.loads(path.read_text())
    assert "kernels look at no clock" in written["otherData"]["kernels"] and written["otherData"]["lost"] == 0
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in written["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return found


@pytest.mark.parametrize(("ranks", "way"), WORLDS)
def test_each_call_is_there_twice_and_in_order(ranks: int, way: str, tmp_path: Path) -> None:
    with gpu_world(ranks, way) as world:
        world.run(total)
        settled(world)
        with purlin_core.trace(tmp_path / "t.json"):
            for _ in range(CALLS):
                outs = world.run(total)
        settled(world)
        assert all((out == 1).all() for out in outs)
        text = world.communicators[0]._calls.last.text if world.communicators[0]._calls.last else ""
    found = tracks(tmp_path / "t.json")
    assert found.keys() == {(rank + 1, track) for rank in range(ranks) for track in (0, 1)}
    for (_, track), slices in found.items():
        assert [event["name"] for event in slices] == [text] * CALLS and slices[0]["cat"] == "call"
        assert all(event["dur"] > 0 for event in slices)
        if track == 1:  # events tell times to half a microsecond
            assert all(one["ts"] + one["dur"] <= next["ts"] + 1 for one, next in pairwise(slices))


def test_what_waits_behind_a_long_kernel_ends_on_the_gpu_after_the_host_has_gone_on(tmp_path: Path) -> None:
    with gpu_world(2) as world:
        world.run(total)
        settled(world)
        with purlin_core.trace(tmp_path / "t.json"):
            torch.cuda._sleep(20 * LONG)
            world.run(total)
        settled(world)
    found = tracks(tmp_path / "t.json")
    for rank in range(2):
        (host,), (gpu,) = found[rank + 1, 0], found[rank + 1, 1]
        assert gpu["ts"] + gpu["dur"] > host["ts"] + host["dur"]


def test_a_captured_call_is_told_and_not_timed(tmp_path: Path) -> None:
    with gpu_world(2) as world:
        xs = world.run(lambda comm: torch.ones(5000, device=comm.device))
        world.run(lambda comm: comm.redistribute(xs[comm.rank], "n@ -> n"))
        settled(world)
        with purlin_core.trace(tmp_path / "t.json"):
            graph, outs = captured(world, lambda comm: comm.redistribute(xs[comm.rank], "n@ -> n"))
        graph.replay()
        settled(world)
        assert all((out == 1).all() for out in outs)
    found = tracks(tmp_path / "t.json")
    assert found.keys() == {(1, 0), (2, 0)}
    assert all("captured" in event["args"] for slices in found.values() for event in slices)


def test_nothing_stays_of_a_trace(tmp_path: Path) -> None:
    with gpu_world(2) as world:
        with purlin_core.trace(tmp_path / "t.json") as trace:
            world.run(total)
        world.run(total)
        settled(world)
        assert all(len(recorder.calls) == 1 for recorder in trace.recorders)
        assert all(comm._calls.tie.recorder is None and not comm._calls.tie.bare for comm in world.communicators)
