"""Results that a communicator makes in its heap: the same values, written directly by peers, while there is room."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator, DeviceError, LocalWorld, Spec
from purlin_core.connection import Connection
from purlin_core.prepare import Site

SPECS = ["n@ d -> n d", "n@ d -> n d"]


def inputs(rank: int, rows: int) -> list[Tensor]:
    return [torch.arange(rows * 64, dtype=torch.float32).reshape(rows, 64) * (k + 1) + rank for k in range(2)]


def expected(ranks: int, rank: int, rows: int) -> list[Tensor]:
    parts = [inputs(r, rows) for r in range(ranks)]
    return [Spec.parse(spec).reference([part[k] for part in parts])[rank] for k, spec in enumerate(SPECS)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rows", [1, 700])
def test_results_are_the_same_and_new_each_time(ranks: int, rows: int) -> None:
    def work(comm: Communicator) -> None:
        kept = [comm.exchange(inputs(comm.rank, rows), SPECS) for _ in range(3)]
        for results in kept:
            assert all(map(torch.equal, results, expected(ranks, comm.rank, rows)))
        assert len({out.data_ptr() for results in kept for out in results}) == 6
        assert comm.stats().regimes == ({"direct": 3} if rows > 1 else {"packet": 3})

    with LocalWorld(ranks, heap_bytes=16 << 20, granted_results=True) as world:
        world.run(work)


def test_a_first_call_in_a_capture_is_refused_before_anything_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may put boxes into device memory, which would break the capture."""

    def work(comm: Communicator) -> None:
        with pytest.raises(DeviceError, match="is being captured"):
            comm.exchange(inputs(comm.rank, 700), SPECS)

    with LocalWorld(2, heap_bytes=16 << 20, granted_results=True) as world:
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "capturing", property(lambda _: True))
            patch.setattr(Site, "plan", lambda *_: pytest.fail("planned"))
            world.run(work)
        world.run(lambda comm: comm.exchange(inputs(comm.rank, 700), SPECS))


def test_what_dies_makes_room_again() -> None:
    def work(comm: Communicator) -> None:
        for _ in range(20):
            comm.exchange(inputs(comm.rank, 700), SPECS)
        assert comm.stats().regimes == {"direct": 20}

    with LocalWorld(2, heap_bytes=2 << 20, granted_results=True) as world:
        world.run(work)


def test_without_room_results_are_ordinary() -> None:
    def work(comm: Communicator) -> None:
        kept = [comm.exchange(inputs(comm.rank, 700), SPECS) for _ in range(4)]
        assert all(all(map(torch.equal, results, expected(2, comm.rank, 700))) for results in kept)
        assert comm.stats().regimes == {"direct": 2, "staged": 2}
        del kept
        comm.exchange(inputs(comm.rank, 700), SPECS)
        assert comm.stats().regimes["direct"] == 3

    with LocalWorld(2, heap_bytes=2 << 20, granted_results=True) as world:
        world.run(work)


def test_what_would_leave_no_room_for_as_much_is_ordinary() -> None:
    def work(comm: Communicator) -> None:
        comm.exchange(inputs(comm.rank, 700), SPECS)
        assert comm.stats().regimes == {"staged": 1}

    with LocalWorld(2, heap_bytes=1 << 20, granted_results=True) as world:
        world.run(work)
