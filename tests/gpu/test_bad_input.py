"""Bad input on a GPU: the laws of tests/core/test_bad_input.py; and tensors of another device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from purlin_core import Communicator, DeviceError, LocalWorld
from tests.core.test_bad_input import BAD, RANKS, assert_named, errors_where_rank_1, on_its_device, told
from tests.core.worlds import errors_of
from tests.gpu.devices import DEVICE, awaited, gpu_world, settled

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def world() -> Iterator[LocalWorld]:
    with gpu_world(RANKS, heap_bytes=1 << 12) as made:
        yield made


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_on_every_rank_and_the_next_call_works(name: str, world: LocalWorld) -> None:
    assert_named(name, world)


@pytest.mark.parametrize("heap_bytes", [0, 64])
@pytest.mark.parametrize("name", ["scalar", "no arrow", "float8 sum"])
def test_what_one_rank_alone_refuses_is_told_by_those_who_wait_for_it(name: str, heap_bytes: int) -> None:
    meet = awaited(Communicator.barrier)

    def first(comm: Communicator) -> None:
        meet(comm)
        if heap_bytes:
            comm.reserve(heap_bytes)  # over another connection, whose calls are counted from its start

    refuses = on_its_device(BAD[name].call)
    told_by, refused = errors_where_rank_1(
        refuses, first=first, meet=meet, ranks=2, device=DEVICE, fused=True, timeout=0.5
    )
    assert str(told_by).endswith(told(refused, entered=1 if heap_bytes else 2))  # the first call is set-up's


def test_tensors_of_the_host_are_refused_by_name(world: LocalWorld) -> None:
    here, there = torch.ones(4, device=DEVICE), torch.ones(4)
    for call in (
        lambda comm: comm.redistribute(there, "n@ -> n"),
        lambda comm: comm.redistribute(here, "n@ -> n", out=torch.ones(12)),
        lambda comm: comm.all_reduce(there),
        lambda comm: comm.all_to_all_single(there[:3], here[:3], [1] * RANKS, [1] * RANKS),
    ):
        for error in errors_of(world, call):
            assert type(error) is DeviceError and "needs to be on cuda:0" in str(error) and "got cpu" in str(error)
    world.run(Communicator.barrier)
    settled(world)


def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match="there is no 'cuda:99'"):
        LocalWorld(2, "cuda:99")
