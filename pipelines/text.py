"""Text encoders with random weights. Always small, even beside a full-size denoiser: their widths fit it, their depth does not."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from .weights import fill


def clip(
    tokenizer: CLIPTokenizer, *, width: int, projected: bool = False, seed: int = 0, dtype: torch.dtype, device: Any
) -> Any:
    """Two layers of CLIP. Pooled: b x width, of the end token, through one more matrix if `projected` (as SD3 wants it)."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=width,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)
    fill(model, seed=seed)
    return model.to(device=device, dtype=dtype).eval()


def t5(tokenizer: T5Tokenizer, *, width: int, seed: int = 0, dtype: torch.dtype, device: Any) -> Any:
    """Two layers of T5's encoder: b x tokens x width."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = T5EncoderModel(config)
    fill(model, seed=seed)
    return model.to(device=device, dtype=dtype).eval()
