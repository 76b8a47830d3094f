"""The order of calls over changing CUDA streams, with streams that are told and not run."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from purlin_core.lane import Lane


class Event:
    def __init__(self, looks: int) -> None:
        self.looks = looks  # before it has happened; -1: the context is broken

    def query(self) -> bool:
        if self.looks < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.looks -= 1
        return self.looks < 0


@dataclass
class Stream:
    raw: int
    captured: bool = False
    looks: int = 0
    behind: list[int] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        self.behind.append(other.raw)

    def record_event(self) -> Event:
        return Event(self.looks)


class Machine:
    """Its current stream, on device 1."""

    def __init__(self) -> None:
        self.current = Stream(0)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> Lane:
        for name, answer in (
            ("_cuda_getCurrentRawStream", lambda _: self.current.raw),
            ("_cuda_getDevice", lambda: 1),
            ("_cuda_isCurrentStreamCapturing", lambda: self.current.captured),
        ):
            monkeypatch.setattr(torch._C, name, answer, raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        return Lane(torch.device("cuda", 1))


def test_only_a_change_of_stream_makes_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    lane, (first, second) = machine.use(monkeypatch), (machine.current, Stream(5))
    for stream in (first, first, second, second, first):
        machine.current = stream
        assert lane.enter() == stream.raw
    assert (second.behind, first.behind) == ([0], [5])


def test_what_is_captured_waits_for_nothing_outside_and_nothing_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    lane, (first, graph) = machine.use(monkeypatch), (machine.current, Stream(5, captured=True))
    seen = []
    for stream in (first, graph, graph, first):
        machine.current = stream
        lane.enter()
        seen.append(lane.captured)
    assert seen == [False, True, True, False] and not graph.behind and not first.behind
    machine.current = graph
    assert lane.capturing() and not lane.settled(1.0)


def test_the_default_stream_is_not_asked_whether_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA captures none such; asking costs half a microsecond a call."""
    machine, asked = Machine(), []
    lane = machine.use(monkeypatch)
    monkeypatch.setattr(lane, "capturing", lambda: asked.append(machine.current.raw) or machine.current.captured)
    for stream in (machine.current, Stream(5), Stream(6, captured=True), machine.current):
        machine.current = stream
        lane.enter()
        assert lane.captured is stream.captured
    assert asked == [5, 6]


@pytest.mark.parametrize(
    ("looks", "timeout", "ended"), [(0, 1.0, True), (3, 5.0, True), (10**9, 0.01, False), (-1, 1.0, True)]
)
def test_an_end_is_waited_for_in_bounded_time(
    looks: int, timeout: float, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    lane = machine.use(monkeypatch)
    assert lane.settled(0.0)  # no call yet
    machine.current.looks = looks
    lane.enter()
    assert lane.settled(timeout) is ended
