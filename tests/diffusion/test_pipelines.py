"""Pipelines by name: each tiny one runs, attention matters in it, and full-size ones have their public size."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from purlin_diffusion.pipelines import flux, sd3, tokenizers
from purlin_diffusion.pipelines.weights import fill, random_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from purlin_diffusion import parallelize, pipelines

TOLERANCE = 1e-5  # max abs of a picture in 0..1, f32
TINY = [name for name in pipelines.names() if name.startswith("tiny:")]
FULL = [name for name in pipelines.names() if name.startswith("random:")]


def draw(pipe: Any, name: str, *, prompt: str = "a photo of a cat", seed: int = 0, **changes: Any) -> np.ndarray:
    """h x w x 3 in 0..1."""
    pipe.set_progress_bar_config(disable=True)
    call = {**pipelines.defaults(name), "output_type": "np", **changes}
    image: np.ndarray = pipe(prompt, generator=torch.Generator().manual_seed(seed), **call).images[0]
    return image


def attend_every_other(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Tensor:
    """As two ranks would that never exchanged a key: a token hears those of its own parity only."""
    parity = torch.arange(query.shape[-2])[:, None] % 2 == torch.arange(key.shape[-2]) % 2
    return attend(query, key, value, **{**others, "attn_mask": parity, "is_causal": False})


attend = F.scaled_dot_product_attention


def weights_of(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_pipeline_draws_what_was_asked(name: str) -> None:
    pipe = pipelines.load(name)
    image = draw(pipe, name)
    assert image.shape == (64, 64, 3) and image.std() > 0.05
    assert np.array_equal(image, draw(pipe, name))
    assert not np.allclose(image, draw(pipe, name, seed=1), atol=0.05)
    assert not np.allclose(image, draw(pipe, name, prompt="two dogs"), atol=0.05)


@pytest.mark.parametrize("name", TINY)
def test_attention_matters_in_a_tiny_pipeline(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no test would see it go wrong."""
    pipe = pipelines.load(name)
    image = draw(pipe, name)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend_every_other)
    assert np.abs(image - draw(pipe, name)).max() > 0.1


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_pipeline_is_well_conditioned(name: str) -> None:
    """Rounding alone stays well below the bound that ranks are held to."""
    pipe = pipelines.load(name)
    shape = (1, 16, 8, 8) if "sd3" in name else (1, 16, 64)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    image, exact = draw(pipe, name, latents=noise), draw(pipe.to(torch.float64), name, latents=noise.double())
    assert np.abs(image - exact).max() < TOLERANCE / 2


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", TINY)
def test_ranks_draw_what_one_draws(name: str, ranks: int) -> None:
    """Two prompts of unlike lengths, for which Qwen-Image masks tokens."""
    pipe, prompts = pipelines.load(name), ["a cat", "two dogs under an old roof"]
    pipe.set_progress_bar_config(disable=True)
    call = {**pipelines.defaults(name), "output_type": "np"}
    if "negative_prompt" in call:
        call["negative_prompt"] = ["", "rain"]

    def pictures() -> np.ndarray:
        images: np.ndarray = pipe(prompts, generator=torch.Generator().manual_seed(0), **call).images
        return images

    one = pictures()
    assert one.shape == (2, 64, 64, 3) and np.abs(one[0] - one[1]).max() > 0.1
    handle = parallelize(pipe, devices=ranks)
    assert np.abs(pictures() - one).max() <= TOLERANCE
    handle.undo()
    assert np.array_equal(pictures(), one)


@pytest.mark.parametrize("name", TINY)
def test_a_saved_pipeline_draws_the_same(name: str, tmp_path: Path) -> None:
    pipe = pipelines.load(name)
    pipe.save_pretrained(tmp_path)
    again = pipelines.load(str(tmp_path))
    assert type(again) is type(pipe)
    for part, model in again.components.items():
        if isinstance(model, nn.Module):  # mapped from a file, weights may lie where other kernels multiply
            setattr(again, part, copy.deepcopy(model))
    assert np.array_equal(draw(pipe, name), draw(again, name))


@pytest.mark.parametrize("name", TINY)
def test_dtype_is_the_callers(name: str) -> None:
    pipe = pipelines.load(name, dtype=torch.bfloat16)
    assert {pipe.transformer.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {torch.bfloat16}
    assert np.isfinite(draw(pipe, name)).all()


def test_knobs_of_tiny_flux() -> None:
    pipe = flux.tiny(
        heads=3, head_dim=32, layers=1, single_layers=3, guidance_embeds=False, vae_channels=(8, 8), seed=5
    )
    config = pipe.transformer.config
    assert (config.num_attention_heads, config.num_layers, config.num_single_layers) == (3, 1, 3)
    assert sum(config.axes_dims_rope) == 32 and not config.guidance_embeds
    assert pipe.vae_scale_factor == 2
    assert draw(pipe, "tiny:flux", height=20, width=12).shape == (20, 12, 3)
    assert not torch.equal(
        pipe.transformer.x_embedder.weight, flux.tiny(heads=3, head_dim=32).transformer.x_embedder.weight
    )


def test_knobs_of_tiny_sd3() -> None:
    pipe = sd3.tiny(heads=5, head_dim=8, layers=3, qk_norm="rms_norm", dual_layers=(0, 1))
    assert pipe.transformer.config.num_attention_heads == 5
    assert [block.attn2 is not None for block in pipe.transformer.transformer_blocks] == [True, True, False]
    assert draw(pipe, "tiny:sd3", height=48, width=80).shape == (48, 80, 3)


# Counted in the public checkpoints' safetensors headers.
WEIGHTS = {"random:flux.1-dev": 11.901e9, "random:sd3-medium": 2.028e9, "random:sd3.5-large": 8.057e9}


@pytest.mark.parametrize("name", FULL)
def test_a_full_pipeline_has_its_size(name: str) -> None:
    """Built without memory behind it. Only the denoiser and the VAE are full, and the line for a report says so."""
    with torch.device("meta"):
        pipe = pipelines.load(name, device="meta")
    if name in WEIGHTS:
        assert weights_of(pipe.transformer) == pytest.approx(WEIGHTS[name], rel=1e-3)
    assert weights_of(pipe.vae) == pytest.approx(126.9e6 if "qwen" in name else 83.8e6, rel=1e-2)
    texts = [part for name, part in pipe.components.items() if name.startswith("text_encoder")]
    assert sum(map(weights_of, texts)) < 0.02 * weights_of(pipe.transformer)
    assert {weight.dtype for weight in pipe.transformer.parameters()} == {torch.bfloat16}
    assert "text encoders small" in pipelines.about(name) and "random weights" in pipelines.about(name)


class Sizes(TorchDispatchMode):
    """Numbers in each real tensor that is made inside it, by dtype: the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta:
            self.largest[result.dtype] = max(self.largest.get(result.dtype, 0), result.numel())
        return result


def test_weights_are_made_in_their_dtype_only() -> None:
    with Sizes() as sizes:
        model = random_model(lambda: nn.Linear(2000, 1500), seed=0, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert sizes.largest[torch.bfloat16] == 2000 * 1500
    assert sizes.largest[torch.float32] < 2000 * 1500
    assert model.weight.float().std().item() == pytest.approx(1 / math.sqrt(2000), rel=0.01)


def test_weights_of_a_seed_agree_between_dtypes_and_matrices_differ() -> None:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Embedding(9, 64))

    wide, narrow = layers(), layers().to(torch.bfloat16)
    fill(wide, seed=3)
    fill(narrow, seed=3)
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=2**-7, atol=0)
    first, second, norm, embedding = wide
    assert not torch.allclose(first.weight, second.weight, atol=0.1)
    assert torch.equal(norm.weight, torch.ones(64)) and 0.9 < embedding.weight.std() < 1.1


def test_a_buffer_that_nobody_computed_is_an_error() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.empty(3))

    with pytest.raises(RuntimeError, match="table of Careless"):
        random_model(Careless, seed=0, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "name", ["flux", "tiny:none", "random:flux", "digits5", "./nowhere/at/all", "a/b/c", "", "owner/"]
)
def test_an_unknown_name_lists_the_known(name: str) -> None:
    for function in (pipelines.check, pipelines.load, pipelines.defaults, pipelines.about):
        with pytest.raises(pipelines.UnknownPipelineError) as caught:
            function(name)
        assert isinstance(caught.value, ValueError)
        assert all(known in str(caught.value) for known in [*pipelines.names(), "folder", "hub id", repr(name)])


def test_a_folder_without_a_pipeline_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(pipelines.UnknownPipelineError, match="save_pretrained"):
        pipelines.check(str(tmp_path))


def test_a_hub_id_is_left_to_diffusers() -> None:
    pipelines.check("black-forest-labs/FLUX.1-dev")
    assert pipelines.defaults("black-forest-labs/FLUX.1-dev") == {}
    assert "black-forest-labs/FLUX.1-dev" in pipelines.about("black-forest-labs/FLUX.1-dev")


def test_names_are_known_without_diffusers() -> None:
    """Its import takes seconds, and a wrong name is told at once."""
    code = (
        "import sys; from purlin_diffusion import pipelines; pipelines.defaults('tiny:sd3'); pipelines.names();"
        "print({'diffusers', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "set()\n", done.stderr


def test_defaults_are_a_copy() -> None:
    pipelines.defaults("tiny:flux").clear()
    assert pipelines.defaults("tiny:flux")["height"] == 64


def test_listed_words_are_one_token_and_others_are_tolerated() -> None:
    words = ["zero", "seven", "three", "Digit"]
    clip, t5 = tokenizers.clip(words, length=16), tokenizers.t5(words)
    for word in words:
        assert len(clip(word).input_ids) == 3 and len(t5(word).input_ids) == 2
    for text in ("", "zebra 7!", "naïve \u4e09"):
        assert len(clip(text, padding="max_length", truncation=True).input_ids) == 16
        assert t5(text).input_ids[-1] == t5.eos_token_id
