"""Hooks of diffusers that are enabled when a model is parallel already: refused by name where ranks would not go on alike, followed where they do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers.hooks import (
    HookRegistry,
    LayerSkipConfig,
    MagCacheConfig,
    ModelHook,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    apply_layer_skip,
)
from torch import Tensor, nn

from purlin_core import LocalWorld
from purlin_diffusion import InputsDifferError, ParallelConfig, PlacementError, parallelize

STEPS = 4


def casting(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


def first_block(model: Any) -> None:
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.9))


def broadcast(model: Any) -> None:
    asked = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (-1, 1000)}
    model.enable_cache(PyramidAttentionBroadcastConfig(**asked, current_timestep_callback=lambda: 500))


def magnitude(model: Any) -> None:
    model.enable_cache(
        MagCacheConfig(threshold=0.5, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS, retention_ratio=0.1)
    )


def taylor(model: Any) -> None:
    model.enable_cache(TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1))


def skipping(model: Any) -> None:
    apply_layer_skip(model, LayerSkipConfig(indices=[1], fqn="transformer_blocks"))


def offload(model: Any) -> None:
    model.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")


CACHES = [broadcast, magnitude, taylor]
HOOKS = [casting, first_block, *CACHES, skipping, offload]
each = pytest.mark.parametrize("enable", HOOKS, ids=lambda enable: enable.__name__)


def steps(case: Any, model: nn.Module) -> list[Tensor]:
    """Of inputs that change a little."""
    with model.cache_context("cond"):  # type: ignore[operator]
        return [case.run(model, hidden_states=case.inputs["hidden_states"] * (1 + 0.1 * i)) for i in range(STEPS)]


@each
@pytest.mark.parametrize("called", [False, True])
def test_what_a_replica_cannot_copy_is_refused_at_the_next_call(
    tiny: Callable[..., Any], enable: Callable[[Any], None], called: bool
) -> None:
    case = tiny("flux")
    handle = parallelize(case.model, ParallelConfig(timeout=20), devices=2)
    if called:
        case.run()
    enable(case.model)
    message = r"FluxTransformer2DModel\.forward: since parallelize, .* cannot copy \(.*\): .* undo\(\) and start"
    for _ in range(2):
        with pytest.raises(PlacementError, match=message):
            steps(case, case.model)
    handle.undo()
    assert all(out.isfinite().all() for out in steps(case, case.model))


@pytest.mark.parametrize("enable", [first_block, *CACHES], ids=lambda enable: enable.__name__)
def test_without_its_cache_the_next_call_works(tiny: Callable[..., Any], enable: Callable[[Any], None]) -> None:
    case = tiny("flux")
    one = case.run()
    handle = parallelize(case.model, ParallelConfig(timeout=20), devices=2)
    enable(case.model)
    with pytest.raises(PlacementError):
        case.run()
    case.model.disable_cache()
    assert (case.run() - one).abs().max() <= 1e-5
    handle.undo()
    assert torch.equal(case.run(), one)


def test_a_change_under_a_hook_around_the_model_is_refused(tiny: Callable[..., Any]) -> None:
    """Around all ranks it stays; a replica made anew would copy it."""
    case = tiny("flux")
    handle = parallelize(case.model, ParallelConfig(timeout=20), devices=2)
    registry = HookRegistry.check_if_exists_or_initialize(case.model)
    registry.register_hook(ModelHook(), "mine")
    case.run()
    case.model.proj_out = nn.Linear(case.model.proj_out.in_features, case.model.proj_out.out_features)
    with pytest.raises(PlacementError, match=r"cannot copy \(mine\): FluxTransformer2DModel"):
        case.run()
    registry.remove_hook("mine", recurse=False)
    with_two = case.run()
    handle.undo()
    assert (with_two - case.run()).abs().max() <= 1e-5


def on_ranks(case: Any, fn: Callable[[int, nn.Module], Any]) -> list[Any]:
    """fn(rank, model) on three ranks that have a model each, as processes do."""
    models = [case.model, *(copy.deepcopy(case.model) for _ in range(2))]

    def rank_of(comm: Any) -> Any:
        torch.set_num_threads(1)
        handle = parallelize(models[comm.rank], communicator=comm)
        try:
            return fn(comm.rank, models[comm.rank])
        finally:
            handle.undo()

    with LocalWorld(3, timeout=20) as world:
        return world.run(rank_of)


@pytest.mark.parametrize("enable", [casting, *CACHES], ids=lambda enable: enable.__name__)
def test_what_goes_by_the_step_does_on_processes_what_it_does_on_one(
    tiny: Callable[..., Any], enable: Callable[[Any], None]
) -> None:
    case = tiny("flux")
    alone, plain = copy.deepcopy(case.model), steps(case, case.model)
    enable(alone)
    one = steps(case, alone)
    assert max((a - b).abs().max() for a, b in zip(one, plain, strict=True)) > 1e-3  # it does something

    def enabled(_: int, model: nn.Module) -> list[Tensor]:
        enable(model)
        return steps(case, model)

    for outs in on_ranks(case, enabled):
        for out, wanted in zip(outs, one, strict=True):
            assert (out - wanted).abs().max() <= 1e-5


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (PlacementError, InputsDifferError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_cache_that_looks_at_tokens_is_refused_on_processes(tiny: Callable[..., Any]) -> None:
    case = tiny("flux")
    one = case.run()

    def enabled(_: int, model: Any) -> tuple[str, Tensor]:
        first_block(model)
        told = said(lambda: steps(case, model))
        model.disable_cache()
        return told, case.run(model)

    for told, out in on_ranks(case, enabled):
        assert told.startswith("PlacementError: ") and "each rank sees tokens of its own" in told
        assert "disable_cache()" in told and "fbc_leader_block_hook" in told
        assert (out - one).abs().max() <= 1e-5


@pytest.mark.parametrize("enable", [casting, broadcast, first_block], ids=lambda enable: enable.__name__)
def test_a_hook_on_one_process_alone_is_named_on_all(tiny: Callable[..., Any], enable: Callable[[Any], None]) -> None:
    case = tiny("flux")

    def enabled(rank: int, model: nn.Module) -> str:
        if rank == 1:
            enable(model)
        return said(lambda: steps(case, model))

    for text in on_ranks(case, enabled):
        assert text.startswith("InputsDifferError: ") and "rank 1 has" in text
        if enable is first_block:  # its own rank refuses it, and tells
            assert "each rank sees tokens of its own" in text
        else:
            assert "hooks of diffusers: " in text and "put hooks (a cache, a casting) on the models of all" in text


def test_a_hook_around_one_process_model_is_its_own(tiny: Callable[..., Any]) -> None:
    case = tiny("flux")

    def watched(rank: int, model: nn.Module) -> str:
        if rank == 0:
            HookRegistry.check_if_exists_or_initialize(model).register_hook(ModelHook(), "mine")
        return said(lambda: case.run(model))

    assert on_ranks(case, watched) == ["nothing"] * 3
