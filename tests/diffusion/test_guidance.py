"""Guidance in one batch, halved: each of two ranks computes a half, the halves are joined by one exchange, and the picture is that of one rank."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from purlin_diffusion.pipelines import sd3 as sd3_pipelines
from torch import Tensor

from purlin_core import Communicator, LocalWorld, ShapeError
from purlin_diffusion import ConfigError, Handle, NotBuiltError, ParallelConfig, Plan, PlanError, parallelize, sharded
from purlin_diffusion.guidance import half, rows_to_halve
from purlin_diffusion.launch import launch
from purlin_diffusion.models import flux, sd3
from purlin_diffusion.report import step_bytes
from tests.diffusion.conftest import TOLERANCE, noise
from tests.diffusion.echo import Studio, done
from tests.diffusion.test_changes import ip_adapter_of_sd3, lora

BACKENDS = ("purlin", "torch")


def difference(x: Tensor, y: Tensor) -> float:
    return (x - y).abs().max().item()


def exchanges(handle: Handle) -> list[int]:
    return [stats.calls for stats in handle.stats]


# ---- calls -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cfg", [None, 2])
@pytest.mark.parametrize("batch", [2, 4, 6])
def test_an_even_batch_is_halved_and_joined_by_one_exchange(
    tiny: Callable[..., Any], batch: int, cfg: int | None, backend: Any
) -> None:
    case = tiny("sd3", batch=batch)
    one = case.run()
    handle = parallelize(case.model, ParallelConfig(cfg=cfg, backend=backend), devices=2)
    for calls in (1, 2):
        assert difference(case.run(), one) <= TOLERANCE
        assert exchanges(handle) == [calls] * 2
    assert [each.halved for each in handle.counters] == [2, 2]
    handle.undo()
    assert torch.equal(case.run(), one)


@pytest.mark.parametrize("batch", [1, 3])
def test_an_odd_batch_is_cut_by_tokens(tiny: Callable[..., Any], batch: int) -> None:
    case = tiny("sd3", batch=batch)
    one = case.run()
    seen = []
    for cfg in (1, 2, None):
        handle = parallelize(case.model, ParallelConfig(cfg=cfg), devices=2)
        assert difference(case.run(), one) <= TOLERANCE
        assert [each.halved for each in handle.counters] == [0, 0]
        seen.append(exchanges(handle))
        handle.undo()
    assert seen[0] == seen[1] == seen[2] and seen[0][0] > 1


@pytest.mark.parametrize(
    "asked", [{"cfg": 1}, {"sequence": 2}, {"attention": "gather_kv"}, {"attention": "ulysses"}], ids=str
)
def test_whoever_asks_for_tokens_gets_them(tiny: Callable[..., Any], asked: dict[str, Any]) -> None:
    case = tiny("sd3")
    one = case.run()
    handle = parallelize(case.model, ParallelConfig(**asked), devices=2)
    assert difference(case.run(), one) <= TOLERANCE
    assert [each.halved for each in handle.counters] == [0, 0] and min(exchanges(handle)) > 1
    ((name, value),) = asked.items()
    assert f"none halved: {name}={value!r} was asked for" in handle.explain()
    handle.undo()


def test_cfg_may_be_asked_for_beside_an_attention(tiny: Callable[..., Any]) -> None:
    handle = parallelize((case := tiny("sd3")).model, ParallelConfig(cfg=2, attention="ulysses"), devices=2)
    case.run()
    assert exchanges(handle) == [1, 1] and "attention=ulysses" in handle.explain()
    handle.undo()


def test_the_same_half_twice_is_far_off(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without rows of its own on each rank, the same tests would fail."""
    case = tiny("sd3")
    one = case.run()
    monkeypatch.setattr(sharded, "half", lambda entries, arguments, rows, rank: half(entries, arguments, rows, 0))
    handle = parallelize(case.model, devices=2)
    assert difference(case.run(), one) > 100 * TOLERANCE
    handle.undo()


class Mixing(JointAttnProcessor2_0):
    """A processor in which rows of a batch know of each other, as those that share a style among pictures."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(attn, hidden_states + hidden_states.mean(0, keepdim=True), *args, **kwargs)


def test_with_a_processor_that_may_mix_rows_calls_are_cut_by_tokens(
    tiny: Callable[..., Any], registered: Callable[[Plan], AbstractContextManager[None]]
) -> None:
    case, plain = tiny("sd3"), tiny("sd3")
    before = plain.run()
    plain.model.set_attn_processor(Mixing())
    one = plain.run()
    assert difference(one, before) > 100 * TOLERANCE
    handle = parallelize(case.model, ParallelConfig(cfg=2), devices=2)
    assert difference(case.run(), before) <= TOLERANCE and handle.counters[0].halved == 1
    case.model.set_attn_processor(Mixing())
    assert difference(case.run(), one) <= TOLERANCE and handle.counters[0].halved == 1
    assert f"but not now: {__name__}.Mixing may mix rows" in handle.explain()
    case.model.set_attn_processor(JointAttnProcessor2_0())
    assert difference(case.run(), before) <= TOLERANCE and handle.counters[0].halved == 2
    handle.undo()
    with registered(replace(sd3.PLAN, rowwise=(*sd3.PLAN.rowwise, f"{__name__}.Mixing"))):
        case.model.set_attn_processor(Mixing())
        handle = parallelize(case.model, devices=2)
        assert difference(case.run(), one) > 100 * TOLERANCE  # what a plan says is believed
        handle.undo()


def passed(name: str) -> dict[str, Any]:
    return {
        "residuals": {"block_controlnet_hidden_states": [noise(4, 35, 40), noise(4, 35, 40, seed=4)]},
        "residuals for all rows": {"block_controlnet_hidden_states": (noise(1, 35, 40),)},
        "skipped layers": {"skip_layers": [1]},
        "one time for all rows": {"timestep": torch.tensor([500.0])},
        "an expanded time": {"timestep": torch.tensor(500.0).expand(4)},
        "nothing by name": {"joint_attention_kwargs": {}, "block_controlnet_hidden_states": None},
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "residuals",
        "residuals for all rows",
        "skipped layers",
        "one time for all rows",
        "an expanded time",
        "nothing by name",
    ],
)
def test_whatever_a_pipeline_passes_is_halved_with_its_rows(tiny: Callable[..., Any], name: str) -> None:
    case = tiny("sd3", batch=4)
    one = case.run(**passed(name))
    handle = parallelize(case.model, devices=2)
    assert difference(case.run(**passed(name)), one) <= TOLERANCE
    assert exchanges(handle) == [1, 1]
    handle.undo()


def test_an_ip_adapter_and_a_lora_are_halved_and_cut_alike(tiny: Callable[..., Any]) -> None:
    case, plain = tiny("sd3"), tiny("sd3")
    before = plain.run()
    handle = parallelize(case.model, devices=2)
    for model in (case.model, plain.model):
        given = ip_adapter_of_sd3(model)
        lora(model)
    one = plain.run(**given)
    assert difference(one, before) > 100 * TOLERANCE
    assert difference(case.run(**given), one) <= TOLERANCE
    row = {name: value[:1] for name, value in {**case.inputs, **given["joint_attention_kwargs"]}.items()}
    single = {
        **{name: row[name] for name in case.inputs},
        "joint_attention_kwargs": {n: row[n] for n in ("ip_hidden_states", "temb")},
    }
    assert difference(case.run(**single), plain.run(**single)) <= TOLERANCE
    assert [each.halved for each in handle.counters] == [1, 1]
    handle.undo()
    assert torch.equal(case.run(**given), one)


@pytest.mark.parametrize("return_dict", [False, True])
def test_the_kind_of_output_is_the_models(tiny: Callable[..., Any], return_dict: bool) -> None:
    case = tiny("sd3")
    handle = parallelize(case.model, devices=2)
    with torch.inference_mode():
        out = case.model(**case.inputs, return_dict=return_dict)
    assert type(out) is (Transformer2DModelOutput if return_dict else tuple)
    assert out[0].shape == case.inputs["hidden_states"].shape and out[0].is_inference()
    handle.undo()


def test_the_callers_tensors_are_only_read(tiny: Callable[..., Any]) -> None:
    case = tiny("sd3")
    before = copy.deepcopy(case.inputs)
    handle = parallelize(case.model, devices=2)
    with torch.no_grad():
        case.model(**case.inputs)
    assert all(torch.equal(case.inputs[name], value) for name, value in before.items())
    handle.undo()


def test_an_argument_without_its_batch_in_the_plan_is_named_and_the_next_call_works(
    tiny: Callable[..., Any], registered: Callable[[Plan], AbstractContextManager[None]]
) -> None:
    case = tiny("sd3")
    odd = tiny("sd3", batch=1)
    with registered(replace(sd3.PLAN, forward={**sd3.PLAN.forward, "pooled_projections": "whole"})):
        handle = parallelize(case.model, ParallelConfig(timeout=20), devices=2)
        with pytest.raises(
            ShapeError, match=r"`?output`? of the root needs .*1 rows of the batch; got shape \(2, .*cfg=1"
        ):
            case.run()
        assert difference(odd.run(case.model), odd.run()) <= TOLERANCE
        handle.undo()


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_worlds_cut_by_tokens(tiny: Callable[..., Any], ranks: int) -> None:
    case = tiny("sd3")
    one = case.run()
    handle = parallelize(case.model, devices=ranks)
    assert difference(case.run(), one) <= TOLERANCE
    assert [each.halved for each in handle.counters] == [0] * ranks
    assert (f"two halves, and the ranks are {ranks}" in handle.explain()) == (ranks > 1)
    handle.undo()


# ---- which calls -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rows", "halved"),
    [
        ({"x": 2}, 2),
        ({"x": 3}, None),
        ({"x": 1}, None),
        ({"x": 0}, None),
        ({"x": 4, "y": 1}, 4),
        ({"x": 4, "y": 2}, None),
    ],
    ids=str,
)
def test_what_is_halved_follows_from_shapes(rows: dict[str, int], halved: int | None) -> None:
    plan = replace(sd3.PLAN, forward={"x": "b c", "y": {"z": ("b n c", "whole")}, "s": "whole"})
    arguments = {"x": noise(rows["x"], 3), "y": {"z": [noise(rows.get("y", 1), 2, 3)]}, "s": noise(2, 2)}
    assert rows_to_halve(plan.arguments, arguments) == halved
    if halved:
        parts = [half(plan.arguments, arguments, halved, rank) for rank in range(2)]
        assert torch.equal(torch.cat([part["x"] for part in parts]), arguments["x"])
        assert all(part["s"] is arguments["s"] for part in parts)
        assert all(part["x"].data_ptr() >= arguments["x"].data_ptr() for part in parts)  # views


# ---- recorded --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("apart", [False, True])
def test_recordings_of_both_kinds_leave_known_what_calls_do(tiny: Callable[..., Any], apart: bool) -> None:
    even, odd = tiny("sd3"), tiny("sd3", batch=1)
    wanted = even.run(), odd.run(even.model)
    handle = Studio().open(even.model, ParallelConfig(graph=True), devices=2, apart=apart)
    rank = handle._sessions[0].sharded
    sent, texts = set(), set()
    for _ in range(4):
        assert difference(even.run(), wanted[0]) <= TOLERANCE
        texts.add(handle.explain().split("last step")[1])
        sent.add(tuple(step_bytes(rank) or ()))
        assert difference(odd.run(even.model), wanted[1]) <= TOLERANCE
        texts.add(handle.explain().split("last step")[1])
        sent.add(tuple(step_bytes(rank) or ()))
    assert done(handle) == [(2, 6, 0)] * 2
    assert len(sent) == len(texts) == 2  # a replay says what the eager call of its kind said
    for each in handle.counters:
        assert (each.calls, each.halved) == (8, 4) and not any(each.kept.values())
    assert sum(each.tokens["image"] for each in handle.counters) == 35 * (4 * 2 + 4)
    handle.undo()


# ---- said ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_explain_says_what_each_kind_of_call_does(tiny: Callable[..., Any], backend: Any) -> None:
    case, odd = tiny("sd3", batch=4), tiny("sd3", batch=1)
    handle = parallelize(case.model, ParallelConfig(backend=backend), devices=2)
    text = handle.explain()
    assert "cfg=2 (sequence=2 where a batch is odd)" in text
    assert "halves an even batch: rank 0 the first rows, rank 1 the last, of all tokens each (chosen" in text
    out = case.run()
    sent = [stats.sent_bytes for stats in handle.stats]
    half_bytes = out.numel() // 2 * out.element_size()
    assert sent == step_bytes(handle._sessions[0].sharded) == [half_bytes] * 2
    text = handle.explain()
    assert f"1 exchange, {sum(sent)} bytes = {sent} by rank; batch 4, halved" in text
    assert "image: 35 = [35, 35] by rank, each of its half of the batch" in text and "fewer than" not in text
    odd.run(case.model)
    text, before = handle.explain(), sent
    sent = [stats.sent_bytes - old for stats, old in zip(handle.stats, before, strict=True)]
    assert f"{sum(sent)} bytes = {sent} by rank; batch 1" in text and "image: 35 = [18, 17] by rank" in text
    handle.undo()
    handle = parallelize(case.model, ParallelConfig(cfg=2), devices=2)
    assert "(cfg=2 was asked for)" in handle.explain()
    handle.undo()


# ---- refused ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("family", "ranks", "error", "text"),
    [
        ("flux", 2, NotBuiltError, r"cfg=2 cannot be for FluxTransformer2DModel: .*guide by two calls .*cfg='calls'"),
        ("sd3", 4, NotBuiltError, r"cfg=2 with sequence=2 is not built yet\. There is cfg=2 on 2 ranks"),
        ("sd3", 3, ConfigError, r"product of 3 ranks; got cfg=2, which is 2"),
        ("sd3", 1, ConfigError, r"product of 1 ranks; got cfg=2, which is 2"),
    ],
)
def test_halves_that_cannot_be_are_refused_on_every_rank_and_nothing_is_changed(
    tiny: Callable[..., Any], family: str, ranks: int, error: type[Exception], text: str
) -> None:
    case = tiny(family)
    one = case.run()
    with pytest.raises(error, match=text):
        parallelize(case.model, ParallelConfig(cfg=2), devices=ranks)

    def rank_of(comm: Communicator) -> str:
        with pytest.raises(error, match=text) as caught:
            parallelize(copy.deepcopy(case.model), ParallelConfig(cfg=2), communicator=comm)
        return str(caught.value)

    with LocalWorld(ranks, timeout=20) as world:
        assert len(set(world.run(rank_of))) == 1
    assert torch.equal(case.run(), one)
    parallelize(case.model, devices=2).undo()


def test_a_plan_that_says_nothing_of_its_output_is_cut_by_tokens(
    tiny: Callable[..., Any], registered: Callable[[Plan], AbstractContextManager[None]]
) -> None:
    """One of a user, written when there was nothing to say."""
    case = tiny("sd3")
    one = case.run()
    old = {**sd3.PLAN.forward, **dict.fromkeys(("hidden_states", "pooled_projections", "timestep"), "whole")}
    with registered(replace(sd3.PLAN, forward=old, output="")):
        handle = parallelize(case.model, devices=2)
        assert difference(case.run(), one) <= TOLERANCE and handle.counters[0].halved == 0
        assert "its plan does not say where its `output` has the batch" in handle.explain()
        handle.undo()
        with pytest.raises(NotBuiltError, match="does not say where its `output` has the batch"):
            parallelize(case.model, ParallelConfig(cfg=2), devices=2)


@pytest.mark.parametrize(
    ("plan", "wrong", "text"),
    [
        (flux.PLAN, {"output": "b n c"}, "`output` joins halves of guidance in one batch; got cfg='calls'"),
        (sd3.PLAN, {"output": "c h w"}, "`output` needs .*the batch, as `b c h w`; got 'c h w'"),
        (sd3.PLAN, {"output": "b@ c"}, "`output` needs a layout without segments"),
        (sd3.PLAN, {"output": "b image c"}, "`output` needs a layout without segments"),
        (sd3.PLAN, {"forward": {"skip_layers": "whole"}}, "no argument in `forward` has"),
        (sd3.PLAN, {"rowwise": ()}, "`output` needs `rowwise`"),
        (sd3.PLAN, {"forward": {"temb": "b image c"}}, "names `image` without `@`"),
        (sd3.PLAN, {"enter": {"pos_embed ->": {0: "b n c"}}}, "needs a sharded segment"),
    ],
)
def test_what_a_plan_says_wrongly_of_its_batch_is_named(plan: Plan, wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        replace(plan, **wrong)


# ---- compiled --------------------------------------------------------------------------------------------------------
@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


HOWS: dict[str, Callable[[Any], Any]] = {
    "blocks": lambda model: model.compile_repeated_blocks(fullgraph=True, backend="eager"),
    "whole": lambda model: model.compile(fullgraph=True, backend="eager"),
}


@pytest.mark.parametrize(
    ("how", "when", "first"),
    [
        ("blocks", "after", "halves"),
        ("blocks", "after", "tokens"),
        ("whole", "before", "tokens"),
        ("whole", "after", "halves"),
    ],
)
@pytest.mark.usefixtures("fresh")
def test_one_compiled_model_serves_both_kinds_of_calls(
    tiny: Callable[..., Any], how: str, when: str, first: str
) -> None:
    """Calls of either kind are right, whichever compiled first, and nothing is compiled once each has been."""
    cases = [tiny("sd3", batch=batch, layers=2) for batch in (4, 3)]
    if first == "tokens":
        cases.reverse()
    model = cases[0].model
    wanted = [case.run(model) for case in cases]
    if when == "before":
        HOWS[how](model)
    handle = parallelize(model, devices=2)
    if when == "after":
        HOWS[how](model)
    for _ in range(2):
        assert all(difference(case.run(model), one) <= TOLERANCE for case, one in zip(cases, wanted, strict=True))
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert all(difference(case.run(model), one) <= TOLERANCE for case, one in zip(cases, wanted, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made > 0
    assert not torch._dynamo.utils.counters["graph_break"]
    assert [each.halved for each in handle.counters] == [3, 3]
    handle.undo()
    assert difference(cases[0].run(model), wanted[0]) <= TOLERANCE


# ---- pictures --------------------------------------------------------------------------------------------------------
def draw(pipe: Any, **changes: Any) -> Tensor:
    call = {"height": 48, "width": 80, "num_inference_steps": 2, "guidance_scale": 3.5, "max_sequence_length": 31}
    generator = torch.Generator().manual_seed(0)
    latents: Tensor = pipe("an oak", generator=generator, **{"output_type": "latent", **call, **changes}).images
    return latents


def shaken(pipe: Any, step: int, time: Any, kept: dict[str, Any]) -> dict[str, Any]:
    return {"latents": kept["latents"] * (1 + 0.1 * step)}


@pytest.mark.parametrize(
    ("call", "calls", "halved"),
    [
        ({}, 2, 2),
        ({"num_images_per_prompt": 2}, 2, 2),
        ({"guidance_scale": 0.0}, 2, 0),
        ({"guidance_scale": 0.0, "num_images_per_prompt": 2}, 2, 2),
        ({"callback_on_step_end": shaken}, 2, 2),
        ({"num_inference_steps": 4, "skip_guidance_layers": [0], "skip_layer_guidance_stop": 0.9}, 7, 4),
    ],
    ids=str,
)
def test_pictures_are_those_of_one_rank(call: dict[str, Any], calls: int, halved: int) -> None:
    pipe = sd3_pipelines.tiny(qk_norm="rms_norm", dual_layers=(0,))
    pipe.set_progress_bar_config(disable=True)
    one = draw(pipe, **call)
    handle = parallelize(pipe, devices=2)
    two = draw(pipe, **call)
    assert (two - one).abs().max() <= 1e-5 * max(1.0, float(one.abs().max()))
    assert {(each.calls, each.halved) for each in handle.counters} == {(calls, halved)}
    handle.undo()
    assert torch.equal(draw(pipe, **call), one)


def in_a_process(wanted: str, backend: Any) -> list[tuple[float, int, int]]:
    """Worst difference, exchanges and halved calls of an even batch, an odd one, and a picture."""
    from tests.diffusion.conftest import sd3 as tiny_sd3

    ones = torch.load(wanted)
    found = []
    for batch, one in zip((2, 1), ones[:2], strict=True):
        case = tiny_sd3(batch=batch)
        handle = parallelize(case.model, ParallelConfig(backend=backend, timeout=60))
        before = handle.stats[0].calls
        worst = difference(case.run(), one)
        found.append((worst, handle.stats[0].calls - before, handle.counters[0].halved))
        handle.undo()
    pipe = sd3_pipelines.tiny()
    pipe.set_progress_bar_config(disable=True)
    handle = parallelize(pipe, ParallelConfig(backend=backend, timeout=60))
    found.append((difference(draw(pipe), ones[2]), 0, handle.counters[0].halved))
    handle.undo()
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize("backend", BACKENDS)
def test_processes_halve_too(tiny: Callable[..., Any], backend: str, tmp_path: Path) -> None:
    pipe = sd3_pipelines.tiny()
    pipe.set_progress_bar_config(disable=True)
    file = tmp_path / "ones.pt"
    torch.save([tiny("sd3").run(), tiny("sd3", batch=1).run(), draw(pipe)], file)
    for even, odd, picture in launch(in_a_process, 2, str(file), backend):
        assert even[0] <= TOLERANCE and odd[0] <= TOLERANCE and picture[0] <= 1e-4
        assert even[2] == 1 and odd[2] == 0 and picture[2] == 2
        assert 1 < even[1] < odd[1]  # the inputs, which come from the root, and the output
