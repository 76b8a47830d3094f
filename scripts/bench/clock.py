"""How a turn is timed: the replay of CUDA graphs of chained calls, or eager calls and a synchronize. Microseconds a call."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from bench.rivals import Rival
from bench.worlds import Lane, World


def issue(world: World, rival: Rival, count: int, lanes: Sequence[Lane] | None = None) -> None:
    """`count` calls of every rank, the n-th on the n-th buffers."""

    def calls(rank: int) -> None:
        for turn in range(count):
            rival.call(rank, turn)

    world.each(calls, lanes)


def capture(world: World, rival: Rival, count: int) -> list[torch.cuda.CUDAGraph]:
    """A graph of `count` calls for each lane. Plans were made and kernels loaded by calls before.

    The ranks of a lane enqueue on the captured stream from threads of their own, which "relaxed" allows.
    """
    graphs = []
    for lane in world.lanes:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(lane.device), torch.cuda.graph(graph, stream=lane.stream, capture_error_mode="relaxed"):
            issue(world, rival, count, [lane])
        graphs.append(graph)
    return graphs


def replay_us(world: World, graphs: Sequence[torch.cuda.CUDAGraph], count: int) -> float:
    """Of the second of two replays in a row: the first hides from it how long a graph takes to launch."""
    first = world.lanes[0]
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    replay(world, graphs)
    _gather(world)
    with first.current():
        began.record()
    _scatter(world)
    replay(world, graphs)
    _gather(world)
    with first.current():
        ended.record()
    world.synchronize()
    return float(began.elapsed_time(ended)) * 1e3 / count


def replay(world: World, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
    for lane, graph in zip(world.lanes, graphs, strict=True):
        with lane.current():
            graph.replay()


def _gather(world: World) -> None:
    """The first lane waits for the others."""
    first, *others = [lane.stream for lane in world.lanes if lane.stream]
    for stream in others:
        first.wait_stream(stream)


def _scatter(world: World) -> None:
    """The others wait for the first lane."""
    first, *others = [lane.stream for lane in world.lanes if lane.stream]
    for stream in others:
        stream.wait_stream(first)


def eager_us(world: World, rival: Rival, count: int) -> float:
    """From the first call until all are done, on the host's clock."""
    world.synchronize()
    began = time.perf_counter()
    issue(world, rival, count)
    world.synchronize()
    return (time.perf_counter() - began) * 1e6 / count
