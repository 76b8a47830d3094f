"""The heap of outputs that can be granted: first fit, freed when a tensor dies, replaced by reserve()."""

from __future__ import annotations

import gc
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator, ShapeError
from purlin_core.heap import HEAP_ALIGN, Heap
from purlin_core.memory import Segment
from tests.core.worlds import same_bits, world_of

ROOM = 1 << 16


def heap(size: int = ROOM) -> Heap:
    return Heap(Segment.private(4096 + size), 4096, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex128, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4, 5)])
def test_a_tensor_of_the_heap_is_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    h = heap()
    x = h.empty(shape, dtype)
    assert x.shape == shape and x.dtype == dtype and x.is_contiguous() and h.holds_all([x])
    if x.numel():
        assert x.data_ptr() % HEAP_ALIGN == 0
        x.zero_()
        assert same_bits(x, torch.zeros(shape, dtype=dtype))


def test_what_lies_outside_or_is_not_contiguous_cannot_be_granted() -> None:
    h = heap()
    x = h.empty((4, 4), torch.float32)
    assert h.holds_all([x, x[1:], x[2:2]])
    assert not h.holds_all([x.T]) and not h.holds_all([x[:, :2]])
    assert (
        not h.holds_all([torch.zeros(4)]) and not h.holds_all([torch.zeros(0)]) and not h.holds_all([x, torch.zeros(4)])
    )
    assert not h.holds_all([heap().empty((4,), torch.float32)])


def test_live_tensors_never_share_a_byte_and_all_room_comes_back() -> None:
    random, h = Random(0), heap()
    live: list[Tensor] = []
    for _ in range(2000):
        if live and random.random() < 0.5:
            live.pop(random.randrange(len(live)))
            continue
        try:
            live.append(h.empty((random.choice((0, 1, 100, 1000, 9000)),), torch.uint8))
        except ShapeError:
            live.clear()
        spans = sorted((x.data_ptr(), x.data_ptr() + x.numel()) for x in live if x.numel())
        assert all(here[1] <= there[0] for here, there in pairwise(spans))
        assert all(h.lo <= lo and hi <= h.hi for lo, hi in spans)
    live.clear()
    assert h.empty((ROOM,), torch.uint8).numel() == ROOM


def test_a_view_keeps_the_room_of_its_tensor() -> None:
    h = heap()
    view = h.empty((ROOM // 4,), torch.float32)[5:6]
    with pytest.raises(ShapeError, match="the largest hole of the heap has 0"):
        h.empty((1,), torch.uint8)
    del view
    h.empty((ROOM,), torch.uint8)


def test_a_tensor_outlives_its_communicator() -> None:
    with world_of(2, heap_bytes=ROOM) as world:
        outs = world.run(lambda comm: comm.empty((100,)).fill_(comm.rank))
    del world
    gc.collect()
    assert [out.sum().item() for out in outs] == [0.0, 100.0]


def test_reserve_gives_a_new_heap_and_old_tensors_stay_good_outputs() -> None:
    def work(comm: Communicator) -> None:
        x = torch.full((20000,), float(comm.rank))
        with pytest.raises(ShapeError, match="reserve"):
            comm.empty((40000,))
        comm.reserve(1 << 18)
        old = comm.empty((40000,))
        comm.all_gather_into_tensor(old, x)
        assert comm.stats().regimes["direct"] == 1
        comm.reserve(1 << 18)
        comm.all_gather_into_tensor(old.zero_(), x)  # from the heap before: an ordinary tensor now
        assert comm.stats().regimes["direct"] == 1 and old.sum() == 20000
        new = comm.empty((40000,))
        comm.all_gather_into_tensor(new, x)
        assert comm.stats().regimes["direct"] == 2 and same_bits(new, old)

    with world_of(2) as world:
        world.run(work)


def test_outputs_of_any_size_can_be_granted_together_wherever_they_lie() -> None:
    """A small output at the very end of the heap beside a large one at its beginning."""

    def work(comm: Communicator) -> None:
        outs = [
            comm.empty((ROOM // 2 - 128,), torch.uint8),
            comm.empty((ROOM // 2,), torch.uint8),
            comm.empty((128,), torch.uint8),
        ]
        xs = [torch.full((out.numel() // 2,), 7 + comm.rank, dtype=torch.uint8) for out in outs]
        comm.exchange(xs, "n@ -> n", out=outs)
        assert comm.stats().regimes == {"direct": 1}
        assert all((half == 7 + rank).all() for out in outs for rank, half in enumerate(out.chunk(2)))

    with world_of(2, "direct", heap_bytes=ROOM) as world:
        world.run(work)
