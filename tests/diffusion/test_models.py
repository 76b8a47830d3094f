"""A parallel FLUX, SD3 or Qwen-Image gives what one rank gives: any lengths, batch, world, mode, and whatever adapters and controls it has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from purlin_diffusion import ParallelConfig, Plan, Segment, parallelize
from purlin_diffusion.models import flux, qwenimage, sd3

TOLERANCE = 1e-5  # max abs, f32
MODES = ("gather_kv", "ulysses")
FAMILIES = ("flux", "sd3", "qwenimage")
PLANS = {"flux": flux.PLAN, "sd3": sd3.PLAN, "qwenimage": qwenimage.PLAN}


def difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def parallel(tiny: Any, ranks: int, mode: str, **changes: Any) -> Tensor:
    """What `ranks` ranks give, and the model as it was."""
    handle = parallelize(tiny.model, ParallelConfig(attention=mode), devices=ranks)
    try:
        return tiny.run(**changes)
    finally:
        handle.undo()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_world_gives_what_one_rank_gives(tiny: Callable[..., Any], family: str, ranks: int, mode: str) -> None:
    case = tiny(family)
    assert difference(parallel(case, ranks, mode), case.run()) <= TOLERANCE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "sizes",
    [
        {"text": 1, "rows": 3, "columns": 3, "batch": 1},
        {"text": 16, "rows": 4, "columns": 4, "batch": 3},
        {"text": 13, "rows": 1, "columns": 1, "batch": 2},
        {"text": 2, "rows": 7, "columns": 11, "batch": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_lengths_and_batch(
    tiny: Callable[..., Any], family: str, sizes: dict[str, int], ranks: int, mode: str
) -> None:
    case = tiny(family, **sizes)
    assert difference(parallel(case, ranks, mode), case.run()) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_repeat_and_sizes_change(tiny: Callable[..., Any], family: str) -> None:
    small, large = tiny(family), tiny(family, text=6, rows=8, columns=3, batch=1)
    one = [small.run(), large.run(small.model)]
    handle = parallelize(small.model, devices=3)
    for _ in range(2):
        assert difference(small.run(), one[0]) <= TOLERANCE
        assert difference(large.run(small.model), one[1]) <= TOLERANCE
    handle.undo()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_left_local_is_far_off(
    tiny: Callable[..., Any], registered: Callable[[Plan], AbstractContextManager[None]], family: str, mode: str
) -> None:
    """The negative control: without the exchange, the same tests would fail."""
    case, plan = tiny(family), PLANS[family]
    with registered(replace(plan, attention=dict.fromkeys(plan.attention, ("local",)))):
        assert difference(parallel(case, 2, mode), case.run()) > 100 * TOLERANCE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_segment_below_its_minimum_stays_whole(
    tiny: Callable[..., Any], registered: Callable[[Plan], AbstractContextManager[None]], family: str, mode: str
) -> None:
    case, plan = tiny(family), PLANS[family]
    with registered(replace(plan, segments=(Segment("text", min=6), Segment("image")))):
        handle = parallelize(case.model, ParallelConfig(attention=mode), devices=2)
        assert difference(case.run(), case.run(tiny(family).model)) <= TOLERANCE
        assert [counters.tokens["text"] for counters in handle.counters] == [11, 11]
        assert [counters.kept["text"] for counters in handle.counters] == [11, 11]
        assert sum(counters.tokens["image"] for counters in handle.counters) == 35
        assert "whole on every rank" in handle.explain()
        handle.undo()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["purlin", "torch"])
def test_either_backend_gives_the_same_bits(tiny: Callable[..., Any], backend: str, mode: str) -> None:
    case = tiny("flux")
    one = parallel(case, 3, mode)
    handle = parallelize(case.model, ParallelConfig(attention=mode, backend=backend), devices=3)
    assert torch.equal(case.run(), one) and handle.route.startswith(backend)
    handle.undo()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2, 46), (2, 1, 1, 46), (2, 1, 46, 46)])
def test_a_mask_over_all_tokens_of_flux(tiny: Callable[..., Any], shape: tuple[int, ...], mode: str) -> None:
    case = tiny("flux")
    mask = torch.ones(shape, dtype=torch.bool)
    mask[1, ..., 7:11] = False
    masked = {"joint_attention_kwargs": {"attention_mask": mask}}
    one = case.run(**masked)
    assert difference(one, case.run()) > 100 * TOLERANCE
    assert difference(parallel(case, 3, mode, **masked), one) <= TOLERANCE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("repeat", [False, True])
def test_controlnet_residuals_of_flux(tiny: Callable[..., Any], repeat: bool, mode: str) -> None:
    case = tiny("flux")
    controls = {
        "controlnet_block_samples": [torch.randn(2, 35, 80), torch.randn(2, 35, 80)],
        "controlnet_single_block_samples": (torch.randn(2, 35, 80),),
        "controlnet_blocks_repeat": repeat,
    }
    one = case.run(**controls)
    assert difference(one, case.run()) > 100 * TOLERANCE
    assert difference(parallel(case, 3, mode, **controls), one) <= TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_controlnet_residuals_of_sd3(tiny: Callable[..., Any], mode: str) -> None:
    case = tiny("sd3")
    controls = {"block_controlnet_hidden_states": [torch.randn(2, 35, 40)]}
    one = case.run(**controls)
    assert difference(one, case.run()) > 100 * TOLERANCE
    assert difference(parallel(case, 3, mode, **controls), one) <= TOLERANCE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("skipped", [[0], [1, 2]])
def test_skipped_layers_of_sd3(tiny: Callable[..., Any], skipped: list[int], mode: str) -> None:
    case = tiny("sd3")
    one = case.run(skip_layers=skipped)
    assert difference(one, case.run()) > 100 * TOLERANCE
    assert difference(parallel(case, 3, mode, skip_layers=skipped), one) <= TOLERANCE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kept", [[11, 7], [11, 0], [3, 3]])
def test_padded_prompts_of_qwenimage(tiny: Callable[..., Any], kept: list[int], ranks: int, mode: str) -> None:
    """Its processor makes a mask of this rank's text and image tokens."""
    case = tiny("qwenimage")
    masked = {"encoder_hidden_states_mask": torch.arange(11)[None] < torch.tensor(kept)[:, None]}
    one = case.run(**masked)
    assert difference(one, case.run()) > 100 * TOLERANCE
    assert difference(parallel(case, ranks, mode, **masked), one) <= TOLERANCE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("edits", [False, True])
def test_several_images_of_qwenimage(tiny: Callable[..., Any], edits: bool, ranks: int, mode: str) -> None:
    case = tiny("qwenimage", rows=3, columns=5, images=3, edits=edits)
    assert difference(parallel(case, ranks, mode), case.run()) <= TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_controlnet_residuals_of_qwenimage(tiny: Callable[..., Any], mode: str) -> None:
    case = tiny("qwenimage")
    controls = {"controlnet_block_samples": [torch.randn(2, 35, 80), torch.randn(2, 35, 80)]}
    one = case.run(**controls)
    assert difference(one, case.run()) > 100 * TOLERANCE
    assert difference(parallel(case, 3, mode, **controls), one) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_errs_no_more_than_one_rank(tiny: Callable[..., Any], family: str, dtype: torch.dtype) -> None:
    """Against one rank in f32, the error in half precision is at most 1.2 times that of one rank in half precision (mean, over the output)."""
    case = tiny(family, rows=9, columns=8)
    exact = case.run()
    case.model.to(dtype)
    floats = {name: value for name, value in case.inputs.items() if isinstance(value, Tensor)}
    halves = {name: value.to(dtype) for name, value in floats.items() if value.is_floating_point()}
    error = (case.run(**halves).float() - exact).abs().mean()
    for mode in MODES:
        ours = (parallel(case, 3, mode, **halves).float() - exact).abs().mean()
        assert ours <= 1.2 * error
