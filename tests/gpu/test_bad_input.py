"""Bad input on a GPU: the laws of tests/core/test_bad_input.py; and tensors of another device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from purlin_core import Communicator, DeviceError, LocalWorld
from tests.core.test_bad_input import BAD, RANKS, assert_named
from tests.core.worlds import errors_of
from tests.gpu.devices import DEVICE, gpu_world, settled

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def world() -> Iterator[LocalWorld]:
    with gpu_world(RANKS, heap_bytes=1 << 12) as made:
        yield made


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_on_every_rank_and_the_next_call_works(name: str, world: LocalWorld) -> None:
    assert_named(name, world)


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
