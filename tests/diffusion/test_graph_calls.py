"""Recorded calls: a replay gives what an eager call gives, on every rank, and what is recorded, replayed and given up follows from the calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from purlin_core import Communicator, LocalWorld
from purlin_core.rendezvous import LocalRendezvous
from purlin_diffusion import ConfigError, Handle, ParallelConfig, parallelize
from purlin_diffusion.graph.state import own_graphs
from purlin_diffusion.graph.take import alike
from tests.diffusion.conftest import TOLERANCE, flux, noise, sd3
from tests.diffusion.echo import Studio, done

FAMILIES = {"flux": flux, "sd3": sd3}
WAYS = [(1, False), (2, False), (3, False), (2, True), (3, True)]  # ranks, whether each makes a recording of its own


def difference(x: Tensor, y: Tensor) -> float:
    return (x - y).abs().max().item()


@pytest.mark.parametrize(("ranks", "apart"), WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_call_is_recorded_and_later_ones_are_replays(family: str, ranks: int, apart: bool) -> None:
    case = FAMILIES[family]()
    changes = [
        {"hidden_states": case.inputs["hidden_states"] * (1 + i), "timestep": case.inputs["timestep"] + i}
        for i in range(4)
    ]
    wanted = [case.run(**change) for change in changes]
    handle = Studio().open(case.model, devices=ranks, apart=apart)
    got = [case.run(**change) for change in changes]
    assert max(map(difference, got, wanted)) <= TOLERANCE
    assert difference(wanted[0], wanted[3]) > 100 * TOLERANCE
    assert done(handle) == [(1, 3, 0)] * ranks
    assert [each.calls for each in handle.counters] == [4] * ranks
    halved = family == "sd3" and ranks == 2
    assert [each.halved for each in handle.counters] == [4 * halved] * ranks
    assert sum(each.tokens["image"] for each in handle.counters) == 4 * 35 * (2 if halved else 1)
    assert all(each.graphs.capture_ms > 0 for each in handle.counters) and handle.counters[0].graphs.pool_bytes > 0
    assert "1 recorded" in handle.explain() and "3 replayed" in handle.explain()


def on_ranks(
    case: Any, fn: Callable[[int, Handle, Callable[..., Tensor]], Any], *, studios: list[Studio], ranks: int = 2
) -> list[Any]:
    """fn(rank, handle, run) on ranks that hold a model and make recordings each, as processes do."""
    models = [case.model, *(copy.deepcopy(case.model) for _ in range(ranks - 1))]

    def rank_of(comm: Communicator) -> Any:
        torch.set_num_threads(1)
        handle = studios[comm.rank].open(models[comm.rank], communicator=comm)
        try:
            return fn(comm.rank, handle, lambda **changes: case.run(models[comm.rank], **changes))
        finally:
            handle.undo()

    with LocalWorld(ranks, timeout=20) as world:
        return world.run(rank_of)


@pytest.mark.parametrize("family", FAMILIES)
def test_processes_record_each_and_alike(family: str) -> None:
    """SD3 by halves of its batch on two ranks, by tokens on three."""
    case = FAMILIES[family]()
    one = case.run()

    def rank_of(rank: int, handle: Handle, run: Callable[..., Tensor]) -> Any:
        outs = [run() for _ in range(4)]
        return max(difference(out, one) for out in outs), done(handle)

    assert [counts for _, counts in on_ranks(case, rank_of, studios=[Studio(), Studio()])] == [[(1, 3, 0)]] * 2
    studios = [Studio() for _ in range(3)]
    results = on_ranks(case, rank_of, studios=studios, ranks=3)
    assert max(worst for worst, _ in results) <= TOLERANCE
    assert not any(pool.live for studio in studios for pool in studio.pools)


def test_outputs_of_two_calls_in_a_step_do_not_overwrite_each_other() -> None:
    """Guidance by two calls keeps the first one's output while the second runs."""
    case = flux()
    prompts = [noise(2, 11, 32, seed=seed) for seed in (5, 6)]
    wanted = [case.run(encoder_hidden_states=prompt) for prompt in prompts]
    handle = Studio().open(case.model, devices=2)
    for _ in range(3):
        got = [case.run(encoder_hidden_states=prompt) for prompt in prompts]
        assert max(map(difference, got, wanted)) <= TOLERANCE
    assert done(handle) == [(1, 5, 0)] * 2
    handle.undo()
    assert max(map(difference, got, wanted)) <= TOLERANCE


def test_the_callers_tensors_are_only_read() -> None:
    case = flux()
    before = copy.deepcopy(case.inputs)
    handle = Studio().open(case.model, devices=2)
    for _ in range(3):
        with torch.no_grad():
            case.model(**case.inputs)
    assert all(torch.equal(case.inputs[name], value) for name, value in before.items())
    handle.undo()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_kind_of_output_is_the_models(ranks: int) -> None:
    case = flux()
    handle = Studio().open(case.model, devices=ranks)
    for _ in range(3):
        with torch.no_grad():
            out = case.model(**case.inputs)
        assert type(out) is Transformer2DModelOutput and out.sample is out[0] and not out.sample.requires_grad
    handle.undo()


def test_every_shape_is_a_recording_of_its_own() -> None:
    cases = [flux(), flux(rows=4), flux(text=7), flux(batch=1)]
    model = cases[0].model
    wanted = [case.run(model) for case in cases]
    handle = Studio().open(model, devices=2)
    for _ in range(3):
        assert max(difference(case.run(model), one) for case, one in zip(cases, wanted, strict=True)) <= TOLERANCE
    assert done(handle) == [(4, 8, 0)] * 2
    assert sum(each.tokens["image"] for each in handle.counters) == 3 * (35 + 28 + 35 + 35)
    handle.undo()


AROUND: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a slower backend": lambda: attention_backend("_native_math"),
}


@pytest.mark.parametrize("around", AROUND)
def test_what_torch_and_diffusers_keep_beside_a_call_is_part_of_its_key(around: str) -> None:
    case = flux()
    with torch.no_grad(), AROUND[around]():
        wanted = case.run()
    # that backend sets torch's flags for the whole process while it runs: with threads each would put back what another had set
    handle = Studio().open(case.model, devices=1 if around == "a slower backend" else 2)
    for _ in range(2):
        case.run()
    for turn in range(3):
        with torch.no_grad(), AROUND[around]():
            out = case.run()
        assert difference(out, wanted) <= (TOLERANCE if around != "autocast" else 0.02), turn
        assert done(handle)[0] == (1 + (turn > 0), 1 + turn, 0)
    handle.undo()


@pytest.mark.parametrize(
    "flag",
    [
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cuda.enable_flash_sdp(False),
    ],
)
def test_flags_are_part_of_the_key(flag: Callable[[], Any]) -> None:
    case = flux()
    handle = Studio().open(case.model, devices=1)
    case.run()
    try:
        flag()
        case.run()
        assert done(handle) == [(0, 0, 0)]
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.enable_flash_sdp(True)
    case.run()
    assert done(handle) == [(1, 1, 0)]
    handle.undo()


def test_numbers_and_texts_are_by_value() -> None:
    case = flux()
    handle = Studio().open(case.model, devices=2)
    for repeat in (False, 0, False, 0):  # equal to Python
        case.run(controlnet_blocks_repeat=repeat)
    assert done(handle)[0] == (2, 2, 0)
    handle.undo()


def test_an_argument_that_nobody_can_look_into_stays_eager_and_is_named() -> None:
    case = sd3()
    handle = Studio().open(case.model, devices=2)
    for _ in range(3):
        assert case.run(skip_layers=range(1)).isfinite().all()
    assert done(handle)[0] == (0, 0, 0)
    assert "`skip_layers` is a range" in handle.explain() and "runs eagerly" in handle.explain()
    for _ in range(2):
        case.run(skip_layers=[0])
    assert done(handle)[0] == (1, 1, 0)
    handle.undo()


# ---- where there are none --------------------------------------------------------------------------------------------
def test_on_the_cpu_auto_is_eager_and_says_so_and_true_is_an_error() -> None:
    case = flux()
    handle = parallelize(case.model, devices=2)
    for _ in range(3):
        case.run()
    assert done(handle) == [(0, 0, 0)] * 2
    assert "runs eagerly: a CUDA graph needs a GPU, and these ranks compute on the cpu" in handle.explain()
    handle.undo()
    with pytest.raises(ConfigError, match=r'graph=True cannot be: .*GPU.*cpu.*graph="auto"'):
        parallelize(case.model, ParallelConfig(graph=True), devices=2)
    parallelize(case.model, devices=2).undo()  # nothing of the refused one is left


@pytest.mark.parametrize("sharing", [1, 2])
def test_a_rank_that_shares_its_device_makes_no_recording_of_its_own(sharing: int) -> None:
    """Its calls can be captured only together with those of the other ranks, which are not ours to record."""
    with Communicator(LocalRendezvous(LocalRendezvous.Meeting(1, sharing=sharing), 0)) as comm:
        assert comm.captured_together == (sharing > 1)
        handle = Studio().open(flux().model, ParallelConfig(), communicator=comm)
        assert ("are recorded together only" in handle.graphs_off) == (sharing > 1)
        handle.undo()


def test_false_means_none() -> None:
    case = flux()
    handle = Studio().open(case.model, ParallelConfig(graph=False), devices=2)
    for _ in range(3):
        case.run()
    assert done(handle) == [(0, 0, 0)] * 2 and "runs eagerly: graph=False" in handle.explain()
    handle.undo()


def test_a_plan_may_forbid_it_with_its_reason(registered: Callable[..., Any]) -> None:
    from dataclasses import replace

    from purlin_diffusion.models.flux import PLAN

    case = flux()
    with registered(replace(PLAN, graph="none: it counts its steps")):
        handle = Studio().open(case.model, ParallelConfig(), devices=2)
        assert handle.graphs_off == "it counts its steps"
        handle.undo()
        with pytest.raises(ConfigError, match="it counts its steps"):
            Studio().open(case.model, devices=2)
    with registered(replace(PLAN, graph="blocks")):
        handle = Studio().open(case.model, ParallelConfig(), devices=2)
        assert "not built yet" in handle.graphs_off
        handle.undo()


def test_threads_over_torch_are_not_recorded() -> None:
    case = flux()
    handle = Studio().open(case.model, ParallelConfig(backend="torch"), devices=2)
    assert "torch.distributed between threads" in handle.graphs_off
    assert case.run().isfinite().all()
    handle.undo()


@pytest.mark.parametrize("how", ["whole", "in place", "a block"])
def test_ours_step_aside_for_graphs_of_torch_compile(how: str) -> None:
    case = flux()
    model: Any = case.model
    if how == "whole":
        model = torch.compile(case.model, mode="reduce-overhead")
    elif how == "in place":
        case.model.compile(options={"triton.cudagraphs": True})
    else:
        case.model.transformer_blocks[1].compile(mode="reduce-overhead")
    handle = Studio().open(model, ParallelConfig(), devices=1)
    assert "torch.compile makes its own" in handle.graphs_off
    handle.undo()


@pytest.mark.parametrize("compiled", [lambda model: torch.compile(model, mode="reduce-overhead").dynamo_ctx.callback])
def test_graphs_of_a_compile_that_came_later_are_seen_by_its_callback(compiled: Callable[[Any], Any]) -> None:
    assert "torch.compile makes its own" in own_graphs(flux().model, compiled(torch.nn.Linear(2, 2)))
    assert own_graphs(flux().model, torch.compile(torch.nn.Linear(2, 2)).dynamo_ctx.callback) == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_compiled_with_graphs_afterwards_ends_ours(ranks: int) -> None:
    case = flux()
    one = case.run()
    handle = Studio().open(case.model, devices=ranks)
    case.run()
    case.run()
    case.model.transformer_blocks[1].compile(mode="reduce-overhead")
    with torch.compiler.set_stance("force_eager"):  # what it computes is not the matter
        for _ in range(3):
            assert difference(case.run(), one) <= TOLERANCE
    assert done(handle)[0] == (1, 1, 1) and "torch.compile makes its own" in handle.graphs_off
    handle.undo()


def test_other_ways_to_compile_leave_ours_on() -> None:
    case = flux()
    case.model.transformer_blocks[1].compile(mode="max-autotune-no-cudagraphs")
    handle = Studio().open(torch.compile(case.model, backend="eager"), devices=1)
    assert handle.graphs_off == ""
    handle.undo()


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_compiled_anew_for_a_recording(family: str) -> None:
    """A GPU refuses that while it records."""
    case = FAMILIES[family]()
    expanded = {"timestep": case.inputs["timestep"][:1].expand(case.inputs["timestep"].shape)}
    wanted = case.run(**expanded)
    torch._dynamo.reset()
    handle = Studio().open(case.model, devices=1)
    for blocks in (module for module in case.model.children() if isinstance(module, nn.ModuleList)):
        for block in blocks:
            block.compile(fullgraph=True, backend="aot_eager")
    case.run(**expanded)
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    got = [case.run(**expanded) for _ in range(3)]
    assert made > 0 and torch._dynamo.utils.counters["stats"]["unique_graphs"] == made
    assert done(handle) == [(1, 3, 0)]
    assert all(difference(each, wanted) <= TOLERANCE for each in got)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).reshape(3, 4),
        lambda: torch.arange(12.0).reshape(3, 4).t(),
        lambda: torch.arange(12.0).reshape(3, 4)[:, 1:3],
        lambda: torch.arange(3.0)[:, None].expand(3, 4),
        lambda: torch.tensor(2.0).expand(5),
        lambda: torch.tensor(2.0),
        lambda: torch.empty(0, 4),
    ],
)
def test_recorded_inputs_lie_as_those_of_the_call(make: Callable[[], Tensor]) -> None:
    x = make()
    copy = alike(x, x.device)
    assert torch.equal(copy, x) and copy.stride() == x.stride() and copy.dtype == x.dtype
    assert copy.data_ptr() != x.data_ptr() or x.numel() == 0
