"""Stable Diffusion 3 and 3.5 without a download: tiny for tests, or at full size by their public configs, random weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from .autoencoder import FULL, TINY, autoencoder
from .entry import Entry
from .weights import random_model

SCALING, SHIFT = 1.5305, 0.0609  # vae/config.json

# transformer/config.json of the three public models.
MEDIUM: Mapping[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
}
MEDIUM_35: Mapping[str, Any] = {
    **MEDIUM,
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
    "dual_attention_layers": tuple(range(13)),
}
LARGE_35: Mapping[str, Any] = {
    **MEDIUM,
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "qk_norm": "rms_norm",
}
CLIP_WIDTHS = (768, 1280)  # pooled texts lie side by side: 2048


def full(
    transformer: Mapping[str, Any] = MEDIUM, *, dtype: torch.dtype = torch.bfloat16, device: torch.device, seed: int = 0
) -> Any:
    """A StableDiffusion3Pipeline whose denoiser and VAE have their real size; its text encoders are small ones of the right widths."""
    return _assemble(transformer, FULL, CLIP_WIDTHS, seed=seed, dtype=dtype, device=device)


def tiny(
    *,
    heads: int = 4,
    head_dim: int = 16,
    layers: int = 2,
    dual_layers: tuple[int, ...] = (),
    qk_norm: str | None = None,
    vae_channels: tuple[int, ...] = TINY,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Any:
    """A StableDiffusion3Pipeline of some 0.3e6 weights. An image of h x w pixels has h/16 * w/16 tokens with four `vae_channels`.

    SD3.5 has qk_norm="rms_norm", and its medium one a second attention, over image tokens only, in `dual_layers`.
    """
    transformer = {
        **MEDIUM,
        "sample_size": 8,
        "num_layers": layers,
        "attention_head_dim": head_dim,
        "num_attention_heads": heads,
        "joint_attention_dim": 64,
        "caption_projection_dim": heads * head_dim,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 96,
        "dual_attention_layers": dual_layers,
        "qk_norm": qk_norm,
    }
    return _assemble(transformer, vae_channels, (32, 32), seed=seed, dtype=dtype, device=torch.device(device))


def _assemble(
    transformer: Mapping[str, Any],
    vae_channels: tuple[int, ...],
    clip_widths: tuple[int, int],
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    from . import text, tokenizers

    tokenizer, tokenizer_2, tokenizer_3 = tokenizers.clip(), tokenizers.clip(pad="!"), tokenizers.t5()
    first, second = clip_widths
    place: Any = {"dtype": dtype, "device": device}
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(vae_channels, scaling=SCALING, shift=SHIFT, seed=seed + 1, **place),
        text_encoder=text.clip(tokenizer, width=first, projected=True, seed=seed + 2, **place),
        tokenizer=tokenizer,
        text_encoder_2=text.clip(tokenizer_2, width=second, projected=True, seed=seed + 3, **place),
        tokenizer_2=tokenizer_2,
        text_encoder_3=text.t5(tokenizer_3, width=transformer["joint_attention_dim"], seed=seed + 4, **place),
        tokenizer_3=tokenizer_3,
        transformer=random_model(lambda: SD3Transformer2DModel(**transformer), seed=seed, **place),
    )


_TINY_CALL = {"height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 2.0, "max_sequence_length": 32}
_FULL_CALL = {"height": 1024, "width": 1024, "num_inference_steps": 28, "max_sequence_length": 256}


def _full_entry(model: str, weights: str, transformer: Mapping[str, Any], guidance: float) -> Entry:
    about = f"{model} by its public config, random weights: denoiser ({weights} weights) and VAE at full size, text encoders small"
    return Entry(partial(full, transformer), {**_FULL_CALL, "guidance_scale": guidance}, torch.bfloat16, about)


ENTRIES: Mapping[str, Entry] = {
    "tiny:sd3": Entry(tiny, _TINY_CALL, torch.float32, "a tiny Stable Diffusion 3, random weights"),
    "tiny:sd3.5": Entry(
        partial(tiny, qk_norm="rms_norm", dual_layers=(0,)),
        _TINY_CALL,
        torch.float32,
        "a tiny Stable Diffusion 3.5 medium (a second attention in its first layer), random weights",
    ),
    "random:sd3-medium": _full_entry("Stable Diffusion 3 medium", "2.0e9", MEDIUM, 7.0),
    "random:sd3.5-medium": _full_entry("Stable Diffusion 3.5 medium", "2.2e9", MEDIUM_35, 4.5),
    "random:sd3.5-large": _full_entry("Stable Diffusion 3.5 large", "8.1e9", LARGE_35, 3.5),
}
