"""No recording is replayed after the model has changed, and none is kept that could not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import Tensor, nn

from purlin_diffusion import ParallelConfig, RankError
from tests.diffusion.conftest import TOLERANCE, Tiny, flux
from tests.diffusion.echo import RECORDING_BYTES, Studio, done
from tests.diffusion.test_changes import ip_adapters_of_flux, lora, new_weights, weigh


def difference(x: Tensor, y: Tensor) -> float:
    return (x - y).abs().max().item()


def scaled(model: nn.Module) -> None:
    model.set_adapters(["wood"], [0.3])


def unloaded(model: nn.Module) -> None:
    model.delete_adapters(["wood"])


def ip_scaled(model: nn.Module) -> None:
    for processor in model.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale = [0.1, 0.1]


def moved(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.data = weight.data.clone() * 0.9
    model.proj_out.weight = nn.Parameter(model.proj_out.weight.detach() * 2)


def backend(model: nn.Module) -> None:
    model.set_attention_backend("_native_math")


def nothing(_: nn.Module) -> None: ...


# what is done before, what is done then; both to the model
CHANGES: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (nothing, lora),
    (lora, scaled),
    (lora, unloaded),
    (ip_adapters_of_flux, ip_scaled),
    (nothing, new_weights),
    (nothing, moved),
    (nothing, lambda model: model.set_attn_processor(FluxAttnProcessor())),
    (nothing, lambda model: model.fuse_qkv_projections()),
    (nothing, lambda model: setattr(model.norm_out, "forward", model.norm_out.forward)),
    (nothing, lambda model: model.register_forward_hook(lambda *_: None)),
    (nothing, lambda model: model.train()),
]


WAYS = [(1, False), (2, False), (2, True)]  # ranks, whether each makes a recording of its own


@pytest.mark.parametrize(
    ("before", "change", "ranks", "apart"),
    # that backend sets torch's flags for the whole process while it runs: with threads each would put back what another had set
    [(*pair, *way) for pair in CHANGES for way in WAYS] + [(nothing, backend, 1, False)],
)
def test_a_change_ends_all_recordings(
    before: Callable[[Any], Any], change: Callable[[Any], Any], ranks: int, apart: bool
) -> None:
    case, plain, studio = flux(), flux(), Studio()
    passed = before(case.model) or {}
    before(plain.model)
    handle = studio.open(case.model, devices=ranks, apart=apart)
    small = flux(rows=2)
    for each in (case, case, small, small):
        each.run(case.model, **passed)
    assert done(handle)[0] == (2, 2, 0)
    for model in (case.model, plain.model):
        change(model)
    out = case.run(**passed)
    assert done(handle)[0] == (2, 2, 2) and not any(pool.live for pool in studio.pools)
    assert difference(out, plain.run(**passed)) <= TOLERANCE
    for _ in range(2):
        assert difference(case.run(**passed), plain.run(**passed)) <= TOLERANCE
    assert done(handle)[0] == (3, 4, 2)
    handle.undo()


def test_a_change_nobody_can_see_is_told_by_on_all() -> None:
    case, studio = flux(), Studio()
    handle = studio.open(case.model, devices=2)
    case.run()
    case.run()
    handle.on_all(lambda model: weigh(model.proj_out))
    assert not any(pool.live for pool in studio.pools)
    case.run()
    assert done(handle) == [(1, 1, 1)] * 2
    handle.undo()


def test_hooks_that_python_must_run_stay_eager_and_are_named() -> None:
    case = flux()
    handle = Studio().open(case.model, devices=1)
    case.run()
    case.run()
    case.model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.2))
    with case.model.cache_context("cond"):
        for _ in range(3):
            assert case.run().isfinite().all()
    assert done(handle) == [(1, 1, 1)] and "hooked into its modules" in handle.explain()
    case.model.disable_cache()
    for _ in range(3):
        case.run()
    assert done(handle) == [(2, 3, 1)] and "hooked into its modules" not in handle.explain()
    handle.undo()


# ---- room --------------------------------------------------------------------------------------------------------------
def shapes(count: int) -> list[Tiny]:
    return [flux(rows=1 + i) for i in range(count)]


def test_the_recording_used_longest_ago_goes_first() -> None:
    case, studio = flux(), Studio()
    handle = studio.open(case.model, ParallelConfig(graph_keys=2), devices=2)
    a, b, c = shapes(3)
    for each in (a, b, a, b, a, c, c):  # a and b are recorded, a used again, c takes b's place
        each.run(case.model)
    assert done(handle)[0] == (3, 4, 1)
    a.run(case.model)
    assert done(handle)[0] == (3, 5, 1)
    b.run(case.model)  # seen before: recorded at once, in the place of c
    assert done(handle)[0] == (4, 6, 2)
    c.run(case.model)
    assert done(handle)[0] == (5, 7, 3) and len(studio.pools[0].live) == 2
    handle.undo()
    assert studio.pools[0].live == [] and studio.pools[0].released == 1


def test_recordings_that_are_too_many_for_the_memory_all_go_and_one_comes_back_alone() -> None:
    case, studio = flux(), Studio(room=3 * RECORDING_BYTES)
    handle = studio.open(case.model, ParallelConfig(graph_memory=0.5), devices=2)
    a, b = shapes(2)
    wanted = b.run(case.model)
    for each in (a, a):
        each.run(case.model)
    assert (
        difference(b.run(case.model), wanted) <= TOLERANCE
    )  # the second that is seen of it is recorded, and does not fit
    assert done(handle)[0] == (2, 1, 2) and studio.pools[0].live == []
    assert difference(b.run(case.model), wanted) <= TOLERANCE
    assert done(handle)[0] == (3, 2, 2) and len(studio.pools[0].live) == 1
    handle.undo()


@pytest.mark.parametrize("apart", [False, True])
def test_one_that_does_not_fit_alone_stays_eager_and_says_so(apart: bool) -> None:
    case, studio = flux(), Studio(room=RECORDING_BYTES)
    handle = studio.open(case.model, ParallelConfig(graph_memory=0.5), devices=2, apart=apart)
    for _ in range(4):
        assert case.run().isfinite().all()
    assert done(handle)[0] == (1, 0, 1) and "graph_memory=0.5" in handle.explain()
    handle.undo()


def test_calls_that_never_come_again_end_the_recording() -> None:
    case, studio = flux(), Studio()
    handle = studio.open(case.model, ParallelConfig(graph_keys=1), devices=1)
    scales = [{"joint_attention_kwargs": {"scale": 0.1 * i}} for i in range(12)]
    for _ in range(2):
        for scale in scales:
            case.run(**scale)
    captures, _, evictions = done(handle)[0]
    assert captures == evictions < len(scales) and "differ too much" in handle.graphs_off
    handle.undo()


# ---- what fails --------------------------------------------------------------------------------------------------------
class Failing:
    """Raises while it is on, whenever it is reached."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.on = error, True

    def __call__(self, *_: Any) -> None:
        if self.on:
            raise self.error


@pytest.mark.parametrize(("ranks", "apart"), [(1, False), (3, False), (3, True)])
def test_a_call_that_cannot_be_recorded_runs_eagerly_on_all_ranks_and_is_named(ranks: int, apart: bool) -> None:
    case = flux()
    one, failing = case.run(), Failing(RuntimeError("operation not permitted when stream is capturing"))
    studio = Studio(fails=failing)
    handle = studio.open(case.model, devices=ranks, apart=apart)
    for _ in range(4):
        assert difference(case.run(), one) <= TOLERANCE
    assert done(handle) == [(0, 0, 0)] * ranks and "not permitted when stream" in handle.explain()
    failing.on = False
    small = flux(rows=2)
    for _ in range(3):
        small.run(case.model)  # another call may
    assert done(handle) == [(1, 2, 0)] * ranks
    handle.undo()


@pytest.mark.parametrize("apart", [False, True])
def test_out_of_memory_frees_what_was_recorded(apart: bool) -> None:
    case, small = flux(), flux(rows=2)
    one, failing = case.run(), Failing(torch.OutOfMemoryError("CUDA out of memory"))
    failing.on = False
    studio = Studio(fails=failing)
    handle = studio.open(case.model, devices=2, apart=apart)
    small.run(case.model)
    small.run(case.model)
    failing.on = True
    for _ in range(2):
        assert difference(case.run(), one) <= TOLERANCE
    assert not any(pool.live for pool in studio.pools) and "out of memory" in handle.explain()
    handle.undo()


def test_three_that_cannot_be_recorded_end_it() -> None:
    case, studio = flux(), Studio(fails=Failing(RuntimeError("no")))
    handle = studio.open(case.model, devices=2)
    for each in shapes(3):
        each.run(case.model)
        each.run(case.model)
    assert "3 calls could not be recorded; the last: RuntimeError: no" in handle.graphs_off
    handle.undo()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("when", ["recorded", "replayed"])
def test_an_exception_of_the_model_is_named_and_the_next_call_works(when: str, apart: bool) -> None:
    """A worker's: it fails in the recording, and again in the eager call that follows; or, as an echo does, in a replay."""
    case, studio, failing = flux(), Studio(), Failing(RuntimeError("out of glue"))
    failing.on = False
    case.model.norm_out.register_forward_hook(
        lambda module, *_: failing() if module is not case.model.norm_out else None
    )
    one = case.run()
    handle = studio.open(case.model, devices=3, apart=apart)
    for _ in range(1 if when == "recorded" else 2):
        case.run()
    failing.on = True
    with pytest.raises(RankError, match=r"rank [12] of 3.*out of glue"):
        case.run()
    failing.on = False
    for _ in range(3):
        assert difference(case.run(), one) <= TOLERANCE
    assert done(handle)[0][0] == (1 if when == "recorded" else 2)  # recorded anew with the new carriers
    handle.undo()
    assert not any(pool.live for pool in studio.pools)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupt_while_recording_is_the_callers(ranks: int) -> None:
    case, failing = flux(), Failing(KeyboardInterrupt())
    one = case.run()
    handle = Studio(fails=failing).open(case.model, devices=ranks)
    case.run()
    with pytest.raises(KeyboardInterrupt):
        case.run()
    failing.on = False
    assert difference(case.run(), one) <= TOLERANCE
    handle.undo()
