"""torch.compile on a GPU: ranks that share it draw what one draws, from kernels that inductor made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from purlin_diffusion.pipelines import flux, sd3
from torch import Tensor
from torch._dynamo.utils import counters

from purlin_diffusion import ParallelConfig, parallelize

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
TOLERANCE = (
    2e-5  # of the largest value, f32: fused kernels round elsewhere, and a Linear on fewer rows may run another kernel
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before
    torch._dynamo.reset()


def draw(pipe: Any, **changes: Any) -> Tensor:
    call = {"height": 48, "width": 80, "num_inference_steps": 2, "guidance_scale": 3.5, "max_sequence_length": 31}
    generator = torch.Generator().manual_seed(0)
    latents: Tensor = pipe("an oak", generator=generator, output_type="latent", **{**call, **changes}).images
    return latents


def difference(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).abs().max() / y.double().abs().max())


@pytest.mark.parametrize("graph", [False, "auto"])
@pytest.mark.parametrize(
    ("family", "mode"),
    [(flux, "gather_kv"), (flux, "ulysses"), (sd3, "gather_kv"), (sd3, "ulysses"), (sd3, "auto")],  # auto: by halves
)
def test_compiled_ranks_draw_what_one_draws(family: Any, mode: str, graph: Any) -> None:
    """Blocks, by diffusers' names or the plan's; twice, and in another size."""
    pipe = family.tiny(device=GPU)
    pipe.set_progress_bar_config(disable=True)
    wanted = [draw(pipe), draw(pipe), draw(pipe, width=112)]
    handle = parallelize(pipe, ParallelConfig(attention=mode, graph=graph), devices=[GPU] * 2)
    pipe.transformer.compile_repeated_blocks(fullgraph=True)
    got = [draw(pipe), draw(pipe), draw(pipe, width=112)]
    for out, one in zip(got, wanted, strict=True):
        assert difference(out, one) <= TOLERANCE
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] > 0
    handle.undo()
    assert difference(draw(pipe), wanted[0]) <= TOLERANCE


def test_a_whole_model_compiled_draws_what_one_draws() -> None:
    pipe = flux.tiny(device=GPU)
    pipe.set_progress_bar_config(disable=True)
    one = draw(pipe)
    handle = parallelize(pipe, devices=[GPU] * 2)
    pipe.transformer.compile(fullgraph=True)
    assert all(difference(draw(pipe), one) <= TOLERANCE for _ in range(2))
    handle.undo()


def test_the_users_own_graphs_are_right() -> None:
    """mode="reduce-overhead" on one rank: ours step aside, and torch's are right."""
    pipe = flux.tiny(device=GPU)
    pipe.set_progress_bar_config(disable=True)
    one = draw(pipe)
    handle = parallelize(pipe, devices=1)
    pipe.transformer.compile(mode="reduce-overhead")
    assert all(difference(draw(pipe), one) <= TOLERANCE for _ in range(3))
    handle.undo()
