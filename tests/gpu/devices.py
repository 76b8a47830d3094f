"""Worlds on GPUs: all ranks of one GPU in one kernel (`fused`), or two ranks on streams of their own (`streams`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from purlin_core import Communicator, LocalWorld
from tests.core.cases import Case
from tests.core.worlds import same_bits, spread, world_of

T = TypeVar("T")
DEVICE = "cuda:0"
WORLDS = ((2, "fused"), (3, "fused"), (4, "fused"), (8, "fused"), (2, "streams"))  # ranks, way


@contextmanager
def gpu_world(ranks: int, way: str = "fused", regime: str = "", **arguments: Any) -> Iterator[LocalWorld]:
    with world_of(ranks, regime, device=DEVICE, fused=way == "fused", **arguments) as world:
        yield world


def settled(world: LocalWorld) -> None:
    """Wait for the GPU, and raise what a kernel found."""
    torch.cuda.synchronize()
    for comm in world.communicators:
        comm.check()


def awaited(call: Callable[[Communicator], object]) -> Callable[[Communicator], object]:
    """The call, and what the kernel found."""

    def work(comm: Communicator) -> object:
        result = call(comm)
        torch.cuda.current_stream().synchronize()
        comm.check()
        return result

    return work


def on_gpu(x: Tensor, device: torch.device | str = DEVICE) -> Tensor:
    """The same bits there, with gaps in memory where `x` has them."""
    return x.to(device) if x.is_contiguous() else spread(x.contiguous().to(device))


def outputs(world: LocalWorld, cases: list[Case], *, granted: bool) -> list[list[Tensor]]:
    """[case][rank], on the host: what each case gives into a new tensor and, the same bits, into one that is given (spread out, or granted).

    Step by step, so that no rank loads a kernel of torch's while another waits in one of ours.
    """
    placed = world.run(lambda comm: [on_gpu(case.inputs[comm.rank]) for case in cases])
    given = world.run(lambda comm: [_output(comm, case, granted=granted) for case in cases])

    def made(comm: Communicator) -> list[Tensor]:
        return [call(comm, case, x, None) for case, x in zip(cases, placed[comm.rank], strict=True)]

    def filled(comm: Communicator) -> list[Tensor]:
        trios = zip(cases, placed[comm.rank], given[comm.rank], strict=True)
        return [call(comm, case, x, out) for case, x, out in trios]

    results = []
    for step in (made, filled):
        outs = world.run(step)
        settled(world)
        results.append([[out.cpu() for out in mine] for mine in outs])
    for rank, (new, old) in enumerate(zip(*results, strict=True)):
        for case, one, other in zip(cases, new, old, strict=True):
            assert same_bits(one, other), f"rank {rank}: {case}"
    return [list(ranks) for ranks in zip(*results[0], strict=True)]


def call(comm: Communicator, case: Case, x: Tensor, out: Tensor | None) -> Tensor:
    return comm.redistribute(x, case.spec, sizes=case.sizes, op=case.op, out=out)


def captured(world: LocalWorld, fn: Callable[[Communicator], T]) -> tuple[torch.cuda.CUDAGraph, list[T]]:
    """fn(comm) of every rank of a fused world in one graph, and what it returned; it has been run before."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = world.run(fn)
    return graph, results


def _output(comm: Communicator, case: Case, *, granted: bool) -> Tensor:
    wanted = case.expected[comm.rank]
    if granted:
        return comm.empty(wanted.shape, wanted.dtype)
    return spread(torch.zeros_like(wanted, device=comm.device))
