"""Keys exchanged in two parts, the second beside attention: the same numbers, eagerly and in CUDA graphs, whatever is launched meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from purlin_diffusion.pipelines import flux
from torch import Tensor
from torch._dynamo.utils import counters

from purlin_core import Communicator, LocalWorld
from purlin_diffusion import Handle, ParallelConfig, parallelize
from purlin_diffusion.attention.layout import parse_layout
from purlin_diffusion.attention.sharded import sharded_attention
from purlin_diffusion.attention.task import TORCH
from purlin_diffusion.beside import Beside
from purlin_diffusion.compiled import Sharding
from tests.diffusion.test_attention import divided
from tests.gpu.devices import DEVICE, captured, gpu_world, settled
from tests.gpu.test_pictures import TOLERANCE, built, difference, draw, sharing

pytestmark = pytest.mark.gpu

LONG = 4_000_000  # cycles: some 2 ms
SIZE, TURNS = 300_000, 12
LAYOUT = parse_layout("image@")
HEAPS = (0, 64 << 20)  # results are ordinary, or lie in the heap
BATCH, HEADS, TOKENS, WIDTH = 2, 5, 801, 64


@pytest.fixture(autouse=True)
def _exact_convolutions() -> Iterator[None]:
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


def opened(world: LocalWorld) -> list[Beside]:
    return [Beside(comm, 0, comm.device) for comm in world.communicators]


# ---- exchanges -------------------------------------------------------------------------------------------------------
def chain(beside: Beside) -> list[Tensor]:
    """Exchanges of values that are made behind a long kernel and die on the host at once, and what else would take their memory."""
    totals = []
    for turn in range(TURNS):
        torch.cuda._sleep(LONG)
        values = [torch.full((SIZE,), 10.0 * turn + beside.rank + part, device=DEVICE) for part in (0, 0.5)]
        moving = [beside.start([value], ["n@ -> n"]) for value in values]
        del values
        taken = [torch.full((SIZE,), -1.0, device=DEVICE) for _ in range(4)]
        for each in moving:
            (whole,) = beside.arrived(each)
            totals.append(whole.view(beside.ranks, SIZE).double().mean(1))
        del moving, each, whole, taken
    return totals


def expected() -> list[list[float]]:
    return [[10.0 * turn + rank + part for rank in range(2)] for turn in range(TURNS) for part in (0, 0.5)]


@pytest.mark.parametrize("heap_bytes", HEAPS)
def test_inputs_are_kept_and_results_are_waited_for(heap_bytes: int) -> None:
    with gpu_world(2, heap_bytes=heap_bytes, granted_results=True) as world:
        sides = opened(world)
        for _ in range(2):  # the first time kernels are loaded and plans made
            for totals in world.run(lambda comm: chain(sides[comm.rank])):
                assert [each.tolist() for each in totals] == expected()
        settled(world)


@pytest.mark.parametrize("heap_bytes", HEAPS)
def test_other_calls_keep_their_order(heap_bytes: int) -> None:
    """On the current stream, between and after; eagerly one stream waits for the other."""

    def work(comm: Communicator) -> None:
        side = sides[comm.rank]
        for turn in range(TURNS):
            x = torch.full((SIZE,), float(turn + comm.rank), device=DEVICE)
            moving = [side.start([x + part], ["n@ -> n"]) for part in range(2)]
            total = comm.all_reduce(x.clone())
            wholes = [side.arrived(each)[0] for each in moving]
            assert (total == 2 * turn + 1).all()
            for part, whole in enumerate(wholes):
                assert whole[::SIZE].tolist() == [turn + part, turn + part + 1]

    with gpu_world(2, heap_bytes=heap_bytes, granted_results=True) as world:
        sides = opened(world)
        world.run(work)
        settled(world)


# ---- attention -------------------------------------------------------------------------------------------------------
def noise(seed: int) -> list[Tensor]:
    """q, k and v of all tokens."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [torch.randn(BATCH, HEADS, TOKENS, WIDTH, device=DEVICE, generator=generator) for _ in range(3)]


def layers(carrier: Any, tensors: list[Tensor]) -> Tensor:
    """Three attentions, one after the other, of this rank's rows."""
    division = divided(2, image=TOKENS)
    first = division.first("image", carrier.rank)
    rows = slice(first, first + division.local("image", carrier.rank))
    q, k, v = (x[:, :, rows] for x in tensors)
    for _ in range(3):
        q = sharded_attention(
            q,
            k + q,
            v,
            None,
            LAYOUT,
            lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v),
            sharding=Sharding(carrier, division, "gather_kv"),
            form=TORCH,
        )
    return q


@pytest.mark.parametrize("heap_bytes", HEAPS)
def test_attention_is_that_of_one_part_and_so_are_replays(heap_bytes: int) -> None:
    """Of one graph for both ranks; replayed with other inputs, and eager calls between."""
    with gpu_world(2, heap_bytes=heap_bytes, granted_results=True) as world:
        sides, here = opened(world), noise(0)
        wanted = world.run(lambda comm: layers(comm, here))
        for _ in range(2):
            for got, one in zip(world.run(lambda comm: layers(sides[comm.rank], here)), wanted, strict=True):
                assert torch.equal(got, one)
        graph, outs = captured(world, lambda comm: layers(sides[comm.rank], here))
        for seed in range(1, 4):
            for x, y in zip(here, noise(seed), strict=True):
                x.copy_(y)
            graph.replay()
            got = [out.clone() for out in outs]
            assert all(map(torch.equal, got, world.run(lambda comm: layers(comm, here)))), seed
            assert all(map(torch.equal, got, world.run(lambda comm: layers(sides[comm.rank], here)))), seed
        settled(world)


# ---- pictures --------------------------------------------------------------------------------------------------------
def shared(pipe: Any, **config: Any) -> Handle:
    return parallelize(pipe, ParallelConfig(attention="gather_kv", timeout=60, **config), devices=sharing(2))


def each_a_gpu(pipe: Any, **config: Any) -> Handle:
    return parallelize(pipe, ParallelConfig(attention="gather_kv", timeout=60, **config), devices=2)


def check_pictures(open_: Callable[..., Handle], family: str, graph: Any) -> None:
    pipe = built(family)
    pictures = []
    for overlap in (False, True):
        handle = open_(pipe, overlap=overlap, graph=graph)
        assert ("beside attention" in handle.explain()) == overlap
        pictures.append([draw(pipe, seed=seed, num_inference_steps=4) for seed in range(2)])
        captures = {each.graphs.captures for each in handle.counters}
        assert captures == ({1} if graph else {0}), handle.explain()
        handle.undo()
    for one, two in zip(*pictures, strict=True):
        assert difference(two, one) <= TOLERANCE
    assert difference(*pictures[1]) > 0.1


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("family", ["flux", "sd3.5"])
def test_pictures_of_ranks_on_one_gpu_are_those_of_one_part(family: str, graph: bool) -> None:
    check_pictures(shared, family, graph)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("family", ["flux", "sd3.5"])
def test_pictures_of_ranks_with_a_gpu_each_are_those_of_one_part(two_gpus: None, family: str, graph: bool) -> None:
    check_pictures(each_a_gpu, family, graph)


@pytest.mark.parametrize("graph", [False, "auto"])
def test_compiled_ranks_draw_what_one_draws(graph: Any) -> None:
    torch._dynamo.reset()
    counters.clear()
    pipe = flux.tiny(device=DEVICE)
    pipe.set_progress_bar_config(disable=True)
    one = draw(pipe)
    handle = shared(pipe, overlap=True, graph=graph)
    pipe.transformer.compile_repeated_blocks(fullgraph=True)
    assert all(difference(draw(pipe), one) <= 2 * TOLERANCE for _ in range(3))
    assert not counters["graph_break"]
    handle.undo()
    torch._dynamo.reset()


def test_ranks_that_share_a_gpu_do_not_overlap_by_themselves() -> None:
    handle = shared(built("flux"))
    assert "in two parts" not in handle.explain()
    handle.undo()


def test_ranks_with_a_gpu_each_do(two_gpus: None) -> None:
    handle = each_a_gpu(built("flux"))
    assert "the second beside attention, from 4 MiB" in handle.explain()
    handle.undo()
