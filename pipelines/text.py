"""Text encoders with random weights. Always small, even beside a full-size denoiser: their widths fit it, their depth does not."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
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


def qwen2_5_vl(tokenizer: Qwen2Tokenizer, *, width: int, seed: int = 0, dtype: torch.dtype, device: Any) -> Any:
    """Two layers of the language model of Qwen2.5-VL, and one of its eye, which nobody shows anything: b x tokens x width."""
    words, heads = len(tokenizer), 2
    parts = width // heads // 2  # of a head, that three axes turn
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": words + 5,
            "hidden_size": width,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 4096,
            "bos_token_id": tokenizer.eos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [parts - 2 * (parts // 3), parts // 3, parts // 3],
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": width,
            "fullatt_block_indexes": [0],
        },
        vision_start_token_id=words,
        vision_end_token_id=words + 1,
        vision_token_id=words + 2,
        image_token_id=words + 3,
        video_token_id=words + 4,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    fill(model, seed=seed)
    return model.to(device=device, dtype=dtype).eval()
