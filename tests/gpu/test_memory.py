"""The heap on a GPU, reserve(), canaries; and a thousand communicators leave nothing behind."""

from __future__ import annotations

import gc
import resource
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore

from purlin_core import Communicator, LocalWorld, PurlinError, ShapeError
from purlin_core.cuda_memory import ProcessMemory
from purlin_core.heap import HEAP_ALIGN
from purlin_core.memory import GUARD_BYTES
from tests.core.cases import COPIES, REDUCTIONS, copy_case, sum_case
from tests.core.processes import Meeting, Processes
from tests.core.test_canary import REGIONS
from tests.core.test_setup import held
from tests.core.worlds import REGIMES, TIMEOUT, errors_of, same_bits, same_values, scratch_for
from tests.gpu.devices import DEVICE, gpu_world, outputs, settled

pytestmark = pytest.mark.gpu

ROOM = 1 << 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex128, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4, 5)])
def test_a_tensor_of_the_heap_is_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with gpu_world(1, heap_bytes=ROOM) as world:
        comm = world.communicators[0]
        x = comm.empty(shape, dtype)
        assert x.shape == shape and x.dtype == dtype and x.is_contiguous() and x.device == comm.device
        assert comm._calls.tie.heap.holds_all([x])
        if x.numel():
            assert x.data_ptr() % HEAP_ALIGN == 0
            assert same_bits(x.zero_().cpu(), torch.zeros(shape, dtype=dtype))


def test_live_tensors_never_share_a_byte_and_all_room_comes_back() -> None:
    random = Random(0)
    with gpu_world(1, heap_bytes=ROOM) as world:
        comm, live = world.communicators[0], list[Tensor]()
        for _ in range(500):
            if live and random.random() < 0.5:
                live.pop(random.randrange(len(live)))
                continue
            try:
                live.append(comm.empty((random.choice((0, 1, 100, 1000, 9000)),), torch.uint8))
            except ShapeError:
                live.clear()
            spans = sorted((x.data_ptr(), x.data_ptr() + x.numel()) for x in live if x.numel())
            assert all(here[1] <= there[0] for here, there in pairwise(spans))
        live.clear()
        view = comm.empty((ROOM,), torch.uint8)[5:6]
        with pytest.raises(ShapeError, match="the largest hole of the heap has 0"):
            comm.empty((1,))
        del view
        comm.empty((ROOM,), torch.uint8)


def test_a_tensor_outlives_its_communicator() -> None:
    with gpu_world(2, heap_bytes=ROOM) as world:
        outs = world.run(lambda comm: comm.empty((100,)).fill_(comm.rank))
    del world
    gc.collect()
    assert [out.sum().item() for out in outs] == [0.0, 100.0]


def test_reserve_gives_a_new_heap_and_old_tensors_stay_good_outputs() -> None:
    def work(comm: Communicator) -> None:
        x = torch.full((400_000,), float(comm.rank), device=comm.device)
        with pytest.raises(ShapeError, match="reserve"):
            comm.empty((800_000,))
        comm.reserve(1 << 22)
        old = comm.empty((800_000,))
        comm.all_gather_into_tensor(old, x)
        assert comm.stats().regimes == {"direct": 1}
        comm.reserve(1 << 22)
        comm.all_gather_into_tensor(old.zero_(), x)  # from the heap before: an ordinary tensor now
        assert comm.stats().regimes == {"direct": 1, "staged": 1} and old.sum() == 400_000
        new = comm.empty((800_000,))
        comm.all_gather_into_tensor(new, x)
        assert comm.stats().regimes["direct"] == 2 and torch.equal(new, old)

    with gpu_world(2) as world:
        world.run(work)
        settled(world)


# ---- nothing is left


@pytest.mark.parametrize(("cycles", "beside"), [(1000, False), (200, True)])
def test_nothing_grows_over_many_communicators(cycles: int, beside: bool) -> None:
    """Device memory, files, mappings (the driver keeps a few) and threads; `beside`: another world is there all the time."""
    small = scratch_for("packet")
    x = torch.zeros(2, 6, device=DEVICE)

    def cycle() -> None:
        with gpu_world(2, scratch=small, heap_bytes=4096) as world:
            kept = world.run(lambda comm: comm.empty((3,)))
            world.run(lambda comm: comm.redistribute(x, "r@ c -> r c@"))
            settled(world)
        del kept

    def free_bytes() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(DEVICE)[0]

    with gpu_world(2) if beside else nullcontext():
        for _ in range(5):
            cycle()
        before, free = held(), free_bytes()
        for _ in range(cycles):
            cycle()
        more = {what: count - before[what] for what, count in held().items()}
        assert all(count <= (3 if what in ("files", "threads") else 50) for what, count in more.items()), more
        assert free_bytes() >= free - (4 << 20)


def grown_over_many_arenas(rank: int, meeting: Meeting, cycles: int) -> dict[str, int]:
    """What this process has more of after `cycles` of an arena made, mapped by the other process, and dropped; the first ones are not counted."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    store = meeting.store()

    def cycle(k: int) -> None:
        memory = ProcessMemory(device, PrefixStore(f"arena {k}", store), meeting.ranks, TIMEOUT)
        own = memory.make(1 << 16)
        mapped = memory.map(own, rank, [f"{meeting.port}-{k}"] * meeting.ranks, ())
        assert len({there.address for there in mapped}) == meeting.ranks

    def all_held() -> dict[str, int]:
        now = held()
        torch.cuda.synchronize()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        return {**now, "host memory": resident, "device memory": -torch.cuda.mem_get_info(device)[0]}

    for k in range(-5, 0):
        cycle(k)
    before = all_held()
    for k in range(cycles):
        cycle(k)
    return {what: count - before[what] for what, count in all_held().items()}


def test_nothing_grows_over_many_arenas_of_processes(tmp_path: Path) -> None:
    """On one GPU, if there are no two: to map memory, none of them needs to run a kernel."""
    with Meeting.of(2, tmp_path) as meeting, Processes(2, grown_over_many_arenas, meeting, 1000) as processes:
        for grown in processes.answers():
            assert all(grown[what] <= 3 for what in ("files", "threads")), grown
            assert grown["mappings of files"] <= 50 and grown["device memory"] <= 4 << 20, grown
            assert grown["host memory"] <= 16 << 20, grown  # torch keeps the name of each


@pytest.mark.parametrize("beside", [False, True])
def test_close_gives_the_memory_back_while_the_world_is_still_about(beside: bool) -> None:
    """`beside`: and another one is."""
    with gpu_world(2) if beside else nullcontext():
        free = torch.cuda.mem_get_info(DEVICE)[0]
        world = LocalWorld(2, DEVICE, heap_bytes=256 << 20)
        assert torch.cuda.mem_get_info(DEVICE)[0] <= free - (512 << 20)
        world.close()
        assert torch.cuda.mem_get_info(DEVICE)[0] >= free - (64 << 20)
        assert world.communicators[0].stats().heap_bytes == 256 << 20


# ---- canaries


@pytest.fixture
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURLIN_CHECK", "1")


@pytest.mark.usefixtures("_checked")
@pytest.mark.parametrize("regime", REGIMES)
def test_every_spec_is_as_right_under_canaries(regime: str) -> None:
    random = Random(5)
    cases = [copy_case(spec, 3, random) for spec in COPIES] + [sum_case(spec, 3, random) for spec in REDUCTIONS]
    with gpu_world(3, "fused", regime) as world:
        for case, outs in zip(cases, outputs(world, cases, granted=regime == "direct"), strict=True):
            same = same_values if case.spec.startswith("+") else same_bits
            assert all(map(same, outs, case.expected)), str(case)


@pytest.mark.usefixtures("_checked")
@pytest.mark.parametrize("region", REGIONS)
def test_a_write_past_a_region_is_named(region: str) -> None:
    def work(comm: Communicator) -> None:
        comm.barrier()
        geometry = comm._calls.tie.site.geometry
        ends = (geometry.rings_at, geometry.packets_at, geometry.heap_at, geometry.arena_bytes)
        if comm.rank == 1:
            arena = comm._calls.tie.heap._arena
            assert arena is not None
            arena.window(ends[REGIONS.index(region)] - 1, 1)[0].zero_()
        comm.barrier()

    with gpu_world(2, heap_bytes=4096) as world:
        fine, caught = errors_of(world, work)
    assert fine is None and type(caught) is PurlinError and f"behind {region}" in str(caught)


@pytest.mark.usefixtures("_checked")
@pytest.mark.parametrize("beyond", [0, GUARD_BYTES - 1])
def test_a_write_past_a_tensor_of_the_heap_is_named(beyond: int) -> None:
    def work(comm: Communicator) -> None:
        empty = partial(comm.empty, dtype=torch.uint8)
        three = [empty((5,)) for _ in range(3)]
        comm.barrier()
        heap = comm._calls.tie.heap
        assert heap._arena is not None
        heap._arena.window(three[1].data_ptr() - heap._arena.address + 5 + beyond, 1)[0].fill_(1)
        comm.barrier()

    with gpu_world(2, heap_bytes=4096) as world:
        for error in errors_of(world, work):
            assert type(error) is PurlinError and "behind a tensor of the heap" in str(error)
