"""A call is in the order of the stream that is current, behind what was enqueued before it and before what comes after, and so when that changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from purlin_core import Communicator
from tests.core.worlds import REGIMES
from tests.gpu.devices import DEVICE, WORLDS, gpu_world, settled

pytestmark = pytest.mark.gpu

LONG = 20_000_000  # cycles: some 10 ms


@pytest.mark.parametrize(("ranks", "way"), WORLDS)
def test_a_call_waits_for_its_input_and_the_next_kernel_for_its_output(ranks: int, way: str) -> None:
    """The input is filled behind a long kernel, and overwritten as soon as the call has returned."""

    def prepared(comm: Communicator) -> Tensor:
        x = torch.zeros(5000, device=comm.device)
        comm.plan([x], "n@ -> n", call="redistribute")
        return x

    def work(comm: Communicator) -> Tensor:
        x = xs[comm.rank]
        torch.cuda._sleep(LONG * (comm.rank + 1))
        x.fill_(comm.rank + 1.0)
        out = comm.redistribute(x, "n@ -> n")
        x.fill_(-1.0)
        return out * 2

    with gpu_world(ranks, way, "staged") as world:
        xs = world.run(prepared)
        for out in world.run(work):
            assert torch.equal(out[::5000], torch.arange(1.0, ranks + 1, device=DEVICE) * 2)
        settled(world)


@pytest.mark.parametrize("regime", REGIMES)
def test_calls_on_changing_streams_keep_their_order(regime: str) -> None:
    """Each rank goes from stream to stream; what delays one delays the calls that come after it on another."""
    streams = [torch.cuda.Stream(DEVICE) for _ in range(3)]

    def prepared(comm: Communicator) -> list[Tensor]:
        make = comm.empty if regime == "direct" else lambda shape: torch.zeros(shape, device=comm.device)
        return [make((1200,)) for _ in range(12)]

    def work(comm: Communicator) -> None:
        for turn, out in enumerate(outs[comm.rank]):
            with torch.cuda.stream(streams[turn % 3]):
                if turn % 4 == 0:
                    torch.cuda._sleep(LONG // 4)
                comm.redistribute(xs[comm.rank][turn], "n@ -> n", out=out)

    with gpu_world(2, "fused", regime, slot_bytes=256) as world:
        xs = [[torch.full((600,), 10.0 * turn + rank, device=DEVICE) for turn in range(12)] for rank in range(2)]
        outs = world.run(prepared)
        torch.cuda.synchronize()
        world.run(work)
        settled(world)
        for mine in outs:
            assert [out[::600].tolist() for out in mine] == [[10.0 * turn, 10.0 * turn + 1] for turn in range(12)]


def test_a_world_works_on_the_stream_of_who_calls_it() -> None:
    side = torch.cuda.Stream(DEVICE)
    with gpu_world(2) as world:
        x = torch.zeros(100, device=DEVICE)
        world.run(lambda comm: comm.redistribute(x, "n@ -> n"))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
            x.fill_(3.0)
            assert world.run(lambda comm: torch.cuda.current_stream() == side) == [True, True]
            outs = world.run(lambda comm: comm.redistribute(x, "n@ -> n"))
            assert all((out == 3).all() for out in outs)
        settled(world)


def test_a_call_returns_before_it_has_run() -> None:
    with gpu_world(2) as world:
        x = torch.zeros(100, device=DEVICE)
        world.run(lambda comm: comm.redistribute(x, "n@ -> n"))
        torch.cuda.synchronize()
        torch.cuda._sleep(50 * LONG)
        world.run(lambda comm: comm.redistribute(x, "n@ -> n"))
        assert not torch.cuda.current_stream().query()
        settled(world)


def test_barrier_holds_the_stream_back() -> None:
    with gpu_world(3) as world:
        world.run(Communicator.barrier)
        settled(world)


def test_what_a_plan_keeps_on_the_gpu_gets_there_whatever_other_streams_are_at() -> None:
    """Two seconds of work on the default stream: planning boxes does not wait for it, so nor does it stand behind a call that waits for a peer."""
    whole = torch.arange(2 * 6 * 8.0).view(2, 6, 8)

    def planned(comm: Communicator) -> None:
        comm.plan([xs[comm.rank]], "s@ h -> s h@")

    def work(comm: Communicator) -> Tensor:
        return comm.redistribute(xs[comm.rank], "s@ h -> s h@")

    with gpu_world(2) as world:
        xs = [shard.to(DEVICE)[:, ::2] for shard in whole]
        torch.cuda.synchronize()
        torch.cuda._sleep(200 * LONG)
        behind = torch.cuda.Event()
        behind.record()
        world.run(planned)
        assert not behind.query()
        outs = world.run(work)
        settled(world)
        for rank, out in enumerate(outs):
            assert torch.equal(out.cpu(), whole.flatten(0, 1)[:, ::2].chunk(2, 1)[rank])
