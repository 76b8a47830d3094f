"""A plan is checked word by word when it is written, and against the live class when a model is parallelized."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from purlin_diffusion import ArgumentError, Plan, PlanError, Refusal, Segment, parallelize
from purlin_diffusion.models import PLANS, flux
from purlin_diffusion.validate import validate

FAMILIES = ("flux", "sd3", "qwenimage")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"segments": (Segment("h"),)}, "needs a name other than"),
        ({"segments": (Segment("text"), Segment("image", unit=0))}, "unit >= 1"),
        ({"segments": (Segment("text"),)}, "no segment is called image"),
        ({"forward": {"hidden_states": "b image@ c -> b image c"}}, "one side of a spec"),
        ({"forward": {"hidden_states": "b image c"}}, "needs a sharded segment"),
        ({"forward": {"hidden_states": "b (image@ c"}}, "cannot be read"),
        ({"forward": {"hidden_states": ("b image@ c", "b c image@")}}, "different numbers of dims"),
        ({"leave": {"proj_out": "whole"}}, "needs one layout"),
        ({"enter": {"proj_out": {0: "b image@ c"}}}, "needs argument names"),
        ({"enter": {"proj_out ->": {"x": "b image@ c"}}}, "needs output numbers"),
        ({"attention": {"blocks.*": "image@"}}, "needs? a tuple"),
        ({"attention": {"blocks.*": ("image@ ->",)}}, "a side without tokens"),
        ({"cfg": "twice"}, "`cfg` needs one of"),
        ({"graph": "none"}, "`graph` needs"),
    ],
)
def test_a_plan_that_cannot_be_read_is_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        replace(flux.PLAN, **wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_plans_fit_the_classes_they_were_written_for(tiny: Callable[..., Any], family: str) -> None:
    model = tiny(family).model
    validate(next(plan for plan in PLANS if plan.model == type(model).__name__), model)


def test_an_argument_added_to_a_forward_is_named_before_anything_is_installed(tiny: Callable[..., Any]) -> None:
    model = tiny("flux").model
    kind = type(model)

    class FluxTransformer2DModel(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Any, grain: Any = None, **_: Any) -> Any:
            return hidden_states

    signature = inspect.signature(kind.forward)
    grain = inspect.Parameter("grain", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    FluxTransformer2DModel.forward.__signature__ = signature.replace(parameters=[*signature.parameters.values(), grain])
    model.__class__ = FluxTransformer2DModel
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(PlanError, match=r"0\.42\.1.*forward takes `grain`, which the plan does not classify"):
        parallelize(model, devices=2)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"leave": {"proj_gone": "b image@ c"}}, "no module `proj_gone`"),
        (
            {"attention": {"transformer_blocks.*.attention": ("text@ image@",)}},
            r"no module `transformer_blocks\.\*\.attention`",
        ),
        (
            {"attention": {"transformer_blocks.*.ff": ("text@ image@",)}},
            r"`transformer_blocks\.0\.ff` has no attention processor",
        ),
        ({"enter": {"norm_out": {"y": "b image@ c"}}}, "`norm_out` takes no argument `y`"),
        ({"refuse": {"bark": Refusal("why", "advice")}}, "forward takes no `bark`"),
        ({"blocks": ("Plank",)}, "no block `Plank`"),
        (
            {"enter": {path: {"temb": "b image@ c"} for path in ("transformer_blocks.*", "transformer_blocks.0")}},
            r"input `temb` of `transformer_blocks\.0` is said twice, by `transformer_blocks\.\*` and `transformer_blocks\.0`",
        ),
        (
            {"enter": {"proj_out ->": {0: "b image@ c"}}},
            "output 0 of `proj_out` is said twice, by `proj_out ->` and `proj_out`",
        ),
        (
            {"attention": {**flux.PLAN.attention, "transformer_blocks.1.attn": ("local",)}},
            r"attention of `transformer_blocks\.1\.attn` is said twice",
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_named(
    tiny: Callable[..., Any],
    registered: Callable[[Plan], AbstractContextManager[None]],
    wrong: dict[str, Any],
    text: str,
) -> None:
    with registered(replace(flux.PLAN, **wrong)), pytest.raises(PlanError, match=text):
        parallelize(tiny("flux").model, devices=2)


def test_a_renamed_module_is_named(tiny: Callable[..., Any]) -> None:
    model = tiny("sd3").model
    model.projection = model.proj_out
    del model.proj_out
    with pytest.raises(PlanError, match="no module `proj_out`"):
        parallelize(model, devices=2)


def test_a_users_plan_takes_the_place_of_ours(
    tiny: Callable[..., Any], registered: Callable[[Plan], AbstractContextManager[None]]
) -> None:
    case = tiny("flux")
    forward = {name: entry for name, entry in flux.PLAN.forward.items() if name != "guidance"}
    with registered(
        replace(flux.PLAN, forward=forward, refuse={"guidance": Refusal("no guidance here", "Leave it out")})
    ):
        handle = parallelize(case.model, devices=2)
        with pytest.raises(ArgumentError, match=r"`guidance` cannot be sharded: no guidance here\. Leave it out"):
            case.run()
        handle.undo()


def test_inputs_may_be_cut_further_in(
    tiny: Callable[..., Any], registered: Callable[[Plan], AbstractContextManager[None]]
) -> None:
    """FLUX cut at its embedders, by argument name and by output, instead of at the root."""
    case = tiny("flux")
    one = case.run()
    forward: dict[str, Any] = {
        **flux.PLAN.forward,
        **dict.fromkeys(("hidden_states", "encoder_hidden_states", "img_ids", "txt_ids"), "whole"),
    }
    enter: dict[str, Any] = {
        "x_embedder": {"input": "b image@ c"},
        "context_embedder ->": {0: "b text@ c"},
        "pos_embed ->": {0: "(text@ image@) d", 1: "(text@ image@) d"},
    }
    with registered(replace(flux.PLAN, forward=forward, enter=enter)):
        handle = parallelize(case.model, devices=3)
        assert (case.run() - one).abs().max() <= 1e-5
        assert isinstance(case.model.x_embedder, nn.Linear)
        handle.undo()


def test_paths_that_meet_at_a_module_are_all_open(
    tiny: Callable[..., Any], registered: Callable[[Plan], AbstractContextManager[None]]
) -> None:
    """FLUX cut at its first block, and its rotary embedding at every block."""
    case = tiny("flux")
    one = case.run()
    tokens = ("hidden_states", "encoder_hidden_states", "img_ids", "txt_ids")
    forward: dict[str, Any] = {**flux.PLAN.forward, **dict.fromkeys(tokens, "whole")}
    rotary = {"image_rotary_emb": "(text@ image@) d"}
    enter: dict[str, Any] = {
        "transformer_blocks.0": {"hidden_states": "b image@ c", "encoder_hidden_states": "b text@ c"},
        "transformer_blocks.*": rotary,
        "single_transformer_blocks.*": rotary,
    }
    with registered(replace(flux.PLAN, forward=forward, enter=enter)):
        handle = parallelize(case.model, devices=3)
        assert (case.run() - one).abs().max() <= 1e-5
        case.model.transformer_blocks[0] = tiny("flux").model.transformer_blocks[0]
        assert (case.run() - one).abs().max() <= 1e-5
        handle.undo()
        case.model.single_transformer_blocks[1] = case.model.single_transformer_blocks[0]  # one module, two names
        one = case.run()
        handle = parallelize(case.model, devices=3)
        assert (case.run() - one).abs().max() <= 1e-5
        handle.undo()
    assert torch.equal(case.run(), one)
