"""FLUX.1 without a download: tiny for tests, or at full size by its public configs, both with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from .autoencoder import FULL, TINY, autoencoder
from .entry import Entry
from .weights import random_model

SCALING, SHIFT = 0.3611, 0.1159  # vae/config.json

# transformer/config.json of the two public models, which differ in one word.
DEV: Mapping[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}
SCHNELL: Mapping[str, Any] = {**DEV, "guidance_embeds": False}

# scheduler/scheduler_config.json
DEV_SCHEDULER: Mapping[str, Any] = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
SCHNELL_SCHEDULER: Mapping[str, Any] = {**DEV_SCHEDULER, "shift": 1.0, "use_dynamic_shifting": False}


def full(
    transformer: Mapping[str, Any] = DEV,
    scheduler: Mapping[str, Any] = DEV_SCHEDULER,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device,
    seed: int = 0,
) -> Any:
    """A FluxPipeline whose denoiser and VAE have their real size; its text encoders are small ones of the right widths.

    11.9e9 weights: 24 GB in bfloat16, made once, on `device`.
    """
    return _assemble(transformer, scheduler, FULL, seed=seed, dtype=dtype, device=device)


def tiny(
    *,
    heads: int = 4,
    head_dim: int = 16,
    layers: int = 2,
    single_layers: int = 2,
    guidance_embeds: bool = True,
    vae_channels: tuple[int, ...] = TINY,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Any:
    """A FluxPipeline of some 0.3e6 weights. An image of h x w pixels has h/16 * w/16 tokens with four `vae_channels`."""
    side = head_dim * 7 // 32 * 2  # of the rotary axes: 16, 56, 56 of 128 in the public models
    transformer = {
        **DEV,
        "num_layers": layers,
        "num_single_layers": single_layers,
        "attention_head_dim": head_dim,
        "num_attention_heads": heads,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "guidance_embeds": guidance_embeds,
        "axes_dims_rope": (head_dim - 2 * side, side, side),
    }
    return _assemble(transformer, DEV_SCHEDULER, vae_channels, seed=seed, dtype=dtype, device=torch.device(device))


def _assemble(
    transformer: Mapping[str, Any],
    scheduler: Mapping[str, Any],
    vae_channels: tuple[int, ...],
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    from . import text, tokenizers

    tokenizer, tokenizer_2 = tokenizers.clip(), tokenizers.t5()
    place: Any = {"dtype": dtype, "device": device}
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**scheduler),
        vae=autoencoder(vae_channels, scaling=SCALING, shift=SHIFT, seed=seed + 1, **place),
        text_encoder=text.clip(tokenizer, width=transformer["pooled_projection_dim"], seed=seed + 2, **place),
        tokenizer=tokenizer,
        text_encoder_2=text.t5(tokenizer_2, width=transformer["joint_attention_dim"], seed=seed + 3, **place),
        tokenizer_2=tokenizer_2,
        transformer=random_model(lambda: FluxTransformer2DModel(**transformer), seed=seed, **place),
    )


_TINY_CALL = {"height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 3.5, "max_sequence_length": 32}
_FULL_CALL = {
    "height": 1024,
    "width": 1024,
    "num_inference_steps": 28,
    "guidance_scale": 3.5,
    "max_sequence_length": 512,
}
_FULL_ABOUT = (
    "by its public config, random weights: denoiser (11.9e9 weights) and VAE at full size, text encoders small"
)

ENTRIES: Mapping[str, Entry] = {
    "tiny:flux": Entry(tiny, _TINY_CALL, torch.float32, "a tiny FLUX.1, random weights"),
    "random:flux.1-dev": Entry(full, _FULL_CALL, torch.bfloat16, f"FLUX.1-dev {_FULL_ABOUT}"),
    "random:flux.1-schnell": Entry(
        partial(full, SCHNELL, SCHNELL_SCHEDULER),
        {**_FULL_CALL, "num_inference_steps": 4, "guidance_scale": 0.0, "max_sequence_length": 256},
        torch.bfloat16,
        f"FLUX.1-schnell {_FULL_ABOUT}",
    ),
}
