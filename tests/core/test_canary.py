"""PURLIN_CHECK=1: a write past a region is named, a byte nobody wrote shows, and whatever is right stays right."""

from __future__ import annotations

from random import Random

import pytest
import torch

from purlin_core import Communicator, PurlinError
from purlin_core.memory import GUARD_BYTES
from tests.core.cases import COPIES, REDUCTIONS, copy_case, sum_case
from tests.core.worlds import REGIMES, errors_of, same_bits, same_values, spread, world_of


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURLIN_CHECK", "1")


@pytest.mark.parametrize("regime", REGIMES)
def test_every_spec_is_as_right_as_without(regime: str) -> None:
    random = Random(5)
    cases = [copy_case(spec, 3, random) for spec in COPIES] + [sum_case(spec, 3, random) for spec in REDUCTIONS]

    def work(comm: Communicator) -> None:
        for case in cases:
            x, wanted = case.inputs[comm.rank], case.expected[comm.rank]
            out = comm.empty(wanted.shape, wanted.dtype) if regime == "direct" else spread(torch.zeros_like(wanted))
            comm.redistribute(x, case.spec, sizes=case.sizes, op=case.op, out=out)
            assert (same_values if case.spec.startswith("+") else same_bits)(out, wanted), str(case)

    with world_of(3, regime) as world:
        world.run(work)


@pytest.mark.parametrize("granted", [True, False])
def test_calls_in_place_still_read_what_they_overwrite(granted: bool) -> None:
    def work(comm: Communicator) -> None:
        mine = slice(8 * comm.rank, 8 * comm.rank + 8)
        out = comm.empty((16,)) if granted else torch.zeros(16)
        out[mine] = comm.rank + 1.0
        comm.all_gather_into_tensor(out, out[mine])
        assert out.tolist() == [1.0] * 8 + [2.0] * 8
        comm.all_reduce(out)
        assert out.tolist() == [2.0] * 8 + [4.0] * 8
        comm.reduce_scatter_tensor(out[mine], out)
        assert out[mine].tolist() == [4.0 * (comm.rank + 1)] * 8

    with world_of(2, "direct") as world:
        world.run(work)


def test_a_byte_that_nobody_wrote_shows() -> None:
    """A call that cannot end leaves the pattern in what has not come; every dtype and stride is filled."""

    outs: list[torch.Tensor] = []

    def kept(comm: Communicator) -> None:
        out = spread(torch.zeros(2, 4, dtype=torch.float16))
        if comm.rank == 0:
            outs.append(out)
            comm.redistribute(torch.ones(1, 4, dtype=torch.float16), "s@ h -> s h", out=out)

    with world_of(2, timeout=0.2) as world:
        assert isinstance(errors_of(world, kept)[0], PurlinError)
    own, missing = outs[0]
    assert own.tolist() == [1.0] * 4
    assert missing.contiguous().view(torch.uint8).tolist() == [0xA5] * 8


REGIONS = ("the words", "the ring slots", "the packet windows", "the heap")


@pytest.mark.parametrize("region", REGIONS)
def test_a_write_past_a_region_is_named(region: str) -> None:
    def work(comm: Communicator) -> None:
        comm.barrier()
        geometry = comm._calls.tie.site.geometry
        ends = (geometry.rings_at, geometry.packets_at, geometry.heap_at, geometry.arena_bytes)
        if comm.rank == 1:
            comm._calls.tie._ending.mapped[1][0].mapping[ends[REGIONS.index(region)] - 1] = 0
        comm.barrier()

    with world_of(2, heap_bytes=4096) as world:
        fine, caught = errors_of(world, work)
    assert (
        fine is None and type(caught) is PurlinError and "barrier" in str(caught) and f"behind {region}" in str(caught)
    )


@pytest.mark.parametrize("beyond", [0, GUARD_BYTES - 1])
def test_a_write_past_a_tensor_of_the_heap_is_named(beyond: int) -> None:
    def work(comm: Communicator) -> None:
        three = [comm.empty((5,), torch.uint8) for _ in range(3)]
        comm.barrier()
        heap = comm._calls.tie._ending.mapped[comm.rank][0]
        heap.mapping[three[1].data_ptr() - heap.address + 5 + beyond] = 1
        comm.barrier()

    with world_of(2, heap_bytes=4096) as world:
        for error in errors_of(world, work):
            assert type(error) is PurlinError and "behind a tensor of the heap" in str(error)


def test_tensors_come_and_go_under_guard() -> None:
    def work(comm: Communicator) -> None:
        for turn in range(40):
            outs = [comm.empty((comm.ranks * size,), torch.uint8) for size in (1, 64, 100 + turn)]
            xs = [torch.full((out.numel() // comm.ranks,), comm.rank, dtype=torch.uint8) for out in outs]
            comm.exchange(xs, "n@ -> n", out=outs)
            assert all(out.sum() == out.numel() // 2 for out in outs)

    with world_of(2, "direct", heap_bytes=4096) as world:
        world.run(work)
