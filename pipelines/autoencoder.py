"""The image decoder that FLUX and Stable Diffusion 3 share but for two numbers, at full size and tiny."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .weights import random_model

FULL = (128, 256, 512, 512)  # channels of each resolution, vae/config.json of both families
TINY = (8, 8, 8, 8)


def autoencoder(
    channels: Sequence[int], *, scaling: float, shift: float, seed: int = 0, dtype: torch.dtype, device: torch.device
) -> Any:
    """16 latent channels; a latent is 2 ** (len(channels) - 1) pixels wide. `scaling` and `shift` are those of its config."""
    from diffusers import AutoencoderKL

    small = max(channels) < 32
    return random_model(
        lambda: AutoencoderKL(
            in_channels=3,
            out_channels=3,
            latent_channels=16,
            block_out_channels=tuple(channels),
            down_block_types=("DownEncoderBlock2D",) * len(channels),
            up_block_types=("UpDecoderBlock2D",) * len(channels),
            layers_per_block=1 if small else 2,
            norm_num_groups=4 if small else 32,
            sample_size=1024,
            scaling_factor=scaling,
            shift_factor=shift,
            force_upcast=True,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        seed=seed,
        dtype=dtype,
        device=device,
    )
