"""Tiny denoisers with random weights, their inputs, and what the tests of this folder say about them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor, nn

from purlin_diffusion import Plan, register
from purlin_diffusion.registry import _plans
from purlin_diffusion.workers import same_kernels

TOLERANCE = 1e-5  # max abs, f32: a Linear on fewer rows may run another kernel, so a whole model is not bitwise
HEADS = 5


@dataclass(frozen=True)
class Tiny:
    """A model and the inputs of one call."""

    name: str
    model: nn.Module
    inputs: dict[str, Any]

    def run(self, model: nn.Module | None = None, **changes: Any) -> Tensor:
        """One call under no_grad, with fresh containers, as pipelines pass them."""
        with torch.no_grad():
            return (self.model if model is None else model)(
                **copy.deepcopy({**self.inputs, **changes}), return_dict=False
            )[0]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    diffusers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with attention_backend("native"), same_kernels():  # set_attention_backend() on one model sets it for all
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny() -> Callable[..., Tiny]:
    """tiny("flux" | "sd3" | "qwenimage", text=..., rows=..., columns=..., batch=...): image tokens are rows x columns."""
    return lambda name, **sizes: {"flux": flux, "sd3": sd3, "qwenimage": qwenimage}[name](**sizes)


@pytest.fixture
def registered() -> Callable[[Plan], AbstractContextManager[None]]:
    """registered(plan): the plan of its class for a while."""

    @contextmanager
    def use(plan: Plan) -> Iterator[None]:
        before = dict(_plans)
        register(plan)
        try:
            yield
        finally:
            _plans.clear()
            _plans.update(before)

    return use


def flux(*, text: int = 11, rows: int = 5, columns: int = 7, batch: int = 2) -> Tiny:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] += torch.arange(rows)[:, None]
    ids[..., 2] += torch.arange(columns)[None]
    inputs = {
        "hidden_states": noise(batch, rows * columns, 16),
        "encoder_hidden_states": noise(batch, text, 32, seed=2),
        "pooled_projections": noise(batch, 32, seed=3),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(text, 3),
        "guidance": torch.full((batch,), 3.5),
    }
    return Tiny("flux", weighted(model), inputs)


def sd3(*, text: int = 11, rows: int = 5, columns: int = 7, batch: int = 2, layers: int = 3) -> Tiny:
    """All but the last of `layers` have two attentions."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=layers,
        attention_head_dim=8,
        num_attention_heads=HEADS,
        joint_attention_dim=32,
        caption_projection_dim=8 * HEADS,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=24,
        dual_attention_layers=tuple(range(layers - 1)),
        qk_norm="rms_norm",
    )
    inputs = {
        "hidden_states": noise(batch, 4, 2 * rows, 2 * columns),
        "encoder_hidden_states": noise(batch, text, 32, seed=2),
        "pooled_projections": noise(batch, 32, seed=3),
        "timestep": torch.full((batch,), 500.0),
    }
    return Tiny("sd3", weighted(model), inputs)


def qwenimage(
    *, text: int = 11, rows: int = 5, columns: int = 7, batch: int = 2, images: int = 1, edits: bool = False
) -> Tiny:
    """`images` of rows x columns; `edits`: as the newer Edit models, which know the first from the others."""
    model = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        zero_cond_t=edits,
    )
    inputs = {
        "hidden_states": noise(batch, images * rows * columns, 16),
        "encoder_hidden_states": noise(batch, text, 32, seed=2),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, rows, columns)] * images] * batch,
    }
    return Tiny("qwenimage", weighted(model), inputs)


def weighted(model: nn.Module) -> nn.Module:
    """Weights large enough that every part of the model shows in its output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.6 / weight.shape[-1] ** 0.5)
            elif "norm" in name and name.endswith("weight"):
                weight.fill_(1.0)
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model.eval()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
