"""Qwen-Image without a download: tiny for tests, or at full size by its public config, both with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .entry import Entry
from .weights import random_model

# transformer/config.json
PUBLIC: Mapping[str, Any] = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}
# vae/config.json; the statistics of latents are the class's own
VAE: Mapping[str, Any] = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
}
# scheduler/scheduler_config.json
SCHEDULER: Mapping[str, Any] = {
    "shift": 1.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}
# Of the pipeline's template: one token each, as they are to the public tokenizer, for the pipeline drops 34 tokens.
_WORDS = "the image by detailing color shape size texture quantity text spatial relationships of objects and background"
TEMPLATE = ("system", "Describe", "user", "assistant", *(f" {word}" for word in _WORDS.split()))


def full(*, dtype: torch.dtype = torch.bfloat16, device: torch.device, seed: int = 0) -> Any:
    """A QwenImagePipeline whose denoiser and VAE have their real size; its text encoder is a small one of the right width.

    20.4e9 weights: 41 GB in bfloat16, made once, on `device`.
    """
    return _assemble(PUBLIC, VAE, seed=seed, dtype=dtype, device=device)


def tiny(
    *,
    heads: int = 4,
    head_dim: int = 16,
    layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Any:
    """A QwenImagePipeline of some 0.4e6 weights. An image of h x w pixels has h/16 * w/16 tokens."""
    side = head_dim * 7 // 32 * 2  # of the rotary axes: 16, 56, 56 of 128 in the public model
    transformer = {
        **PUBLIC,
        "num_layers": layers,
        "attention_head_dim": head_dim,
        "num_attention_heads": heads,
        "joint_attention_dim": 32,
        "axes_dims_rope": (head_dim - 2 * side, side, side),
    }
    vae = {**VAE, "base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return _assemble(transformer, vae, seed=seed, dtype=dtype, device=torch.device(device))


def _assemble(
    transformer: Mapping[str, Any], vae: Mapping[str, Any], *, seed: int, dtype: torch.dtype, device: torch.device
) -> Any:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    from . import text, tokenizers

    tokenizer = tokenizers.qwen2(TEMPLATE)
    place: Any = {"dtype": dtype, "device": device}
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=random_model(lambda: AutoencoderKLQwenImage(**vae), seed=seed + 1, **place),
        text_encoder=text.qwen2_5_vl(tokenizer, width=transformer["joint_attention_dim"], seed=seed + 2, **place),
        tokenizer=tokenizer,
        transformer=random_model(lambda: QwenImageTransformer2DModel(**transformer), seed=seed, **place),
    )


_TINY_CALL = {
    "height": 64,
    "width": 64,
    "num_inference_steps": 2,
    "true_cfg_scale": 2.0,
    "negative_prompt": " ",
    "max_sequence_length": 64,
}
_FULL_CALL = {"height": 1328, "width": 1328, "num_inference_steps": 50, "true_cfg_scale": 4.0, "negative_prompt": " "}

ENTRIES: Mapping[str, Entry] = {
    "tiny:qwenimage": Entry(tiny, _TINY_CALL, torch.float32, "a tiny Qwen-Image, random weights"),
    "random:qwenimage": Entry(
        full,
        _FULL_CALL,
        torch.bfloat16,
        "Qwen-Image by its public config, random weights: denoiser (20.4e9 weights) and VAE at full size, text encoders small",
    ),
}
