"""What a user does to a model before or after parallelize is followed: LoRA, IP-Adapters, processors, fused projections, new weights, copies."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import JointAttnProcessor2_0, SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor
from torch import Tensor, nn

from purlin_core.errors import ClosedError
from purlin_diffusion import ParallelConfig, PlanError, parallelize

peft = pytest.importorskip("peft")

TOLERANCE = 1e-5
MODES = ("gather_kv", "ulysses")
Change = Callable[[nn.Module], dict[str, Any]]  # changes the model; returns what to pass along


def difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def noise(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weigh(module: nn.Module, scale: float = 0.3) -> None:
    with torch.no_grad():
        for i, weight in enumerate(module.parameters()):
            weight.copy_(noise(*weight.shape, seed=i) * scale)


def lora(model: nn.Module) -> dict[str, Any]:
    """On attention and on the module where tokens leave, which LoRA replaces."""
    targets = ["to_q", "to_v", "to_out.0", "proj_out", "context_embedder"]
    model.add_adapter(peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False), "wood")
    for name, module in model.named_modules():
        if "lora_" in name and isinstance(module, nn.Linear):
            weigh(module)
    return {}


def lora_scaled(model: nn.Module) -> dict[str, Any]:
    lora(model)
    model.set_adapters(["wood"], [0.4])
    return {}


def lora_scaled_by_call(model: nn.Module) -> dict[str, Any]:
    lora(model)
    name = "joint_attention_kwargs"
    takes = inspect.signature(type(model).forward).parameters
    return {name if name in takes else name.removeprefix("joint_"): {"scale": 0.3}}


def ip_adapters_of_flux(model: nn.Module) -> dict[str, Any]:
    """Two adapters: two calls more in each of the first blocks."""
    processors = {}
    for name, processor in model.attn_processors.items():
        if name.startswith("transformer_blocks"):
            processor = FluxIPAdapterAttnProcessor(80, 24, num_tokens=(4, 3), scale=[0.7, 0.4])
            weigh(processor)
        processors[name] = processor
    model.set_attn_processor(processors)
    return {"joint_attention_kwargs": {"ip_hidden_states": [noise(2, 4, 24), noise(2, 3, 24, seed=8)]}}


def ip_adapter_of_sd3(model: nn.Module) -> dict[str, Any]:
    processors = {}
    for name in model.attn_processors:
        processors[name] = SD3IPAdapterJointAttnProcessor2_0(40, 24, head_dim=8, timesteps_emb_dim=16, scale=0.6)
        weigh(processors[name])
    model.set_attn_processor(processors)
    return {"joint_attention_kwargs": {"ip_hidden_states": noise(2, 6, 24), "temb": noise(2, 16)}}


def fused_projections(model: nn.Module) -> dict[str, Any]:
    model.fuse_qkv_projections()
    return {}


def new_weights(model: nn.Module) -> dict[str, Any]:
    model.proj_out = nn.Linear(model.proj_out.in_features, model.proj_out.out_features)
    weigh(model.proj_out)
    return {}


def weights_in_place(model: nn.Module) -> dict[str, Any]:
    weigh(model.transformer_blocks[0])
    return {}


def new_processors(model: nn.Module) -> dict[str, Any]:
    model.set_attn_processor(type(next(iter(model.attn_processors.values())))())
    weigh(model.proj_out)
    return {}


CHANGES = [
    ("flux", lora),
    ("flux", lora_scaled),
    ("flux", lora_scaled_by_call),
    ("flux", ip_adapters_of_flux),
    ("flux", fused_projections),
    ("flux", new_weights),
    ("flux", weights_in_place),
    ("flux", new_processors),
    ("sd3", lora),
    ("sd3", ip_adapter_of_sd3),
    ("sd3", new_processors),
    ("qwenimage", lora),
    ("qwenimage", lora_scaled_by_call),
    ("qwenimage", new_weights),
    ("qwenimage", new_processors),
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "change"), CHANGES, ids=lambda value: getattr(value, "__name__", value))
def test_a_change_before_or_after_gives_what_one_rank_gives(
    tiny: Callable[..., Any], family: str, change: Change, mode: str, when: str
) -> None:
    case, plain = tiny(family), tiny(family)
    one_before = plain.run()
    passed = change(plain.model)
    one = plain.run(**passed)
    if change is not fused_projections:
        assert difference(one, one_before) > 100 * TOLERANCE
    if when == "before":
        change(case.model)
    handle = parallelize(case.model, ParallelConfig(attention=mode), devices=3)
    if when == "after":
        assert difference(case.run(), one_before) <= TOLERANCE
        change(case.model)
    for _ in range(2):
        assert difference(case.run(**passed), one) <= TOLERANCE
    handle.undo()
    assert torch.equal(case.run(**passed), one)


def test_an_adapter_may_be_scaled_and_unloaded(tiny: Callable[..., Any]) -> None:
    case, plain = tiny("flux"), tiny("flux")
    handle = parallelize(case.model, devices=2)
    for model in (case.model, plain.model):
        lora(model)
    for scale in (1.0, 0.2, 0.9):
        for model in (case.model, plain.model):
            model.set_adapters(["wood"], [scale])
        assert difference(case.run(), plain.run()) <= TOLERANCE
    for model in (case.model, plain.model):
        model.delete_adapters(["wood"])
    assert difference(case.run(), plain.run()) <= TOLERANCE
    handle.undo()


def test_the_scale_of_an_ip_adapter_is_followed(tiny: Callable[..., Any]) -> None:
    case, plain = tiny("flux"), tiny("flux")
    ip_adapters_of_flux(plain.model)
    passed = ip_adapters_of_flux(case.model)
    handle = parallelize(case.model, devices=2)
    seen = []
    for scale in (0.7, 0.1):
        for model in (case.model, plain.model):
            for processor in model.attn_processors.values():
                if isinstance(processor, FluxIPAdapterAttnProcessor):
                    processor.scale = [scale, scale]
        assert difference(case.run(**passed), plain.run(**passed)) <= TOLERANCE
        seen.append(plain.run(**passed))
    assert difference(*seen) > 100 * TOLERANCE
    handle.undo()


def test_nothing_changed_makes_no_new_replicas(tiny: Callable[..., Any]) -> None:
    case = tiny("flux")
    handle = parallelize(case.model, devices=2)
    case.run()
    replica = handle._sessions[0]._workers[0].sharded.model
    case.run()
    assert handle._sessions[0]._workers[0].sharded.model is replica
    assert replica is not case.model
    assert {id(x) for x in replica.parameters()} == {
        id(x) for x in case.model.parameters()
    }  # the CPU's weights are shared
    handle.on_all(lambda model: None)
    assert handle._sessions[0]._workers[0].sharded.model is not replica
    handle.undo()


def test_ranks_that_a_failure_has_ended_begin_anew_for_on_all_but_not_after_undo(tiny: Callable[..., Any]) -> None:
    case = tiny("flux")
    one = case.run()
    handle = parallelize(case.model, devices=2)

    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    hook = case.model.transformer_blocks[0].register_forward_pre_hook(fails)
    with pytest.raises(MemoryError, match="no room"):
        case.run()
    hook.remove()
    assert handle.on_all(lambda model: 7) == [7]
    assert difference(case.run(), one) <= TOLERANCE
    handle.undo()
    with pytest.raises(ClosedError, match="Call parallelize again"):
        handle.on_all(lambda model: pytest.fail("it has no ranks"))


class OwnProcessor:
    """A user's processor for FLUX that calls torch directly."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Any = None,
        attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        from diffusers.models.embeddings import apply_rotary_emb

        q, k, v = (x(hidden_states).unflatten(-1, (attn.heads, -1)) for x in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        if encoder_hidden_states is not None:
            added = (
                x(encoder_hidden_states).unflatten(-1, (attn.heads, -1))
                for x in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            )
            eq, ek, ev = added
            q, k, v = (torch.cat(pair, 1) for pair in ((attn.norm_added_q(eq), q), (attn.norm_added_k(ek), k), (ev, v)))
        q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        out = self.attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).flatten(2, 3)
        if encoder_hidden_states is None:
            return out
        text = encoder_hidden_states.shape[1]
        return attn.to_out[0](out[:, text:]), attn.to_add_out(out[:, :text])

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class HiddenProcessor(OwnProcessor):
    """One whose attention nobody can see from outside."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v


@pytest.mark.parametrize("mode", MODES)
def test_a_users_own_processor_is_sharded(tiny: Callable[..., Any], mode: str) -> None:
    case = tiny("flux")
    one = case.run()
    handle = parallelize(case.model, ParallelConfig(attention=mode), devices=3)
    case.model.set_attn_processor(OwnProcessor())
    assert difference(case.run(), one) <= TOLERANCE
    handle.undo()


def test_a_processor_that_hides_its_attention_is_refused(tiny: Callable[..., Any]) -> None:
    case = tiny("flux")
    handle = parallelize(case.model, devices=2)
    case.model.set_attn_processor(HiddenProcessor())
    with pytest.raises(PlanError, match="HiddenProcessor computes attention in a way that cannot be seen"):
        case.run()
    case.model.set_attn_processor(FluxAttnProcessor())
    assert difference(case.run(), case.run(tiny("flux").model)) <= TOLERANCE
    handle.undo()


def test_processors_keep_their_identity(tiny: Callable[..., Any]) -> None:
    case = tiny("sd3")
    before = dict(case.model.attn_processors)
    shared = case.model.transformer_blocks[0]
    assert shared.attn.processor is shared.attn2.processor
    handle = parallelize(case.model, devices=2)
    assert all(case.model.attn_processors[name] is processor for name, processor in before.items())
    assert all(isinstance(processor, JointAttnProcessor2_0) for processor in before.values())
    handle.undo()
    assert all(type(processor) is JointAttnProcessor2_0 for processor in before.values())


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_a_deep_copy_is_a_plain_model_of_its_own(tiny: Callable[..., Any], family: str) -> None:
    case = tiny(family)
    one = case.run()
    handle = parallelize(case.model, devices=2)
    twin = copy.deepcopy(case.model)
    weigh(case.model.proj_out)
    assert torch.equal(case.run(twin), one)  # its own weights, and no doors
    assert difference(case.run(), one) > 100 * TOLERANCE
    again = parallelize(twin, devices=2)
    assert difference(case.run(twin), one) <= TOLERANCE
    again.undo()
    handle.undo()


def test_compiled_models_are_recognised(tiny: Callable[..., Any]) -> None:
    case = tiny("flux")
    compiled = torch.compile(case.model, backend="eager")
    handle = parallelize(compiled, devices=2)
    assert handle.ranks == 2
    handle.undo()
