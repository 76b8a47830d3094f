"""Qwen-Image, its Edit and Layered models: text and image tokens joined, text first. The forward counts text tokens for their positions, so they are
cut at the first block; their positions are cut where they are made."""

from purlin_diffusion.plan import Plan, Segment

PLAN = Plan(
    model="QwenImageTransformer2DModel",
    written_for="0.42.1",
    segments=(Segment("text", min=1), Segment("image", min=1)),  # its rotary embedding takes no empty tensor
    forward={
        "hidden_states": "b image@ c",
        "encoder_hidden_states": "whole",
        "encoder_hidden_states_mask": "whole",
        "timestep": "whole",
        "img_shapes": "whole",
        "guidance": "whole",
        "attention_kwargs": {"scale": "whole"},
        "controlnet_block_samples": "b image@ c",
        "additional_t_cond": "whole",
        "return_dict": "whole",
    },
    enter={
        "pos_embed ->": {0: "image@ c", 1: "text@ c"},
        "transformer_blocks.0": {"encoder_hidden_states": "b text@ c"},
        # Edit's: which of two time embeddings an image token has
        "transformer_blocks.*": {"encoder_hidden_states_mask": "b text@", "modulate_index": "b image@"},
    },
    leave={"proj_out": "b image@ c"},
    attention={"transformer_blocks.*.attn": ("text@ image@",)},
    cfg="calls",
    # padded prompts, and Edit's newer models, copy from the host, too
    graph="none: its positions lie in a cache of diffusers that may let go of them, and a recording would go on reading them",
    blocks=("QwenImageTransformerBlock",),
)
