"""FLUX.1 (dev, schnell, Fill, Kontext, Control): text and image tokens joined, text first. Both are cut before anything is computed."""

from purlin_diffusion.plan import Plan, Refusal, Segment

# Two kinds of calls: the joint one, then one for each IP-Adapter, whose keys every rank has.
JOINT = ("text@ image@", "image@ -> *", "...")

PLAN = Plan(
    model="FluxTransformer2DModel",
    written_for="0.42.1",
    segments=(Segment("text"), Segment("image")),
    forward={
        "hidden_states": "b image@ c",
        "encoder_hidden_states": "b text@ c",
        "pooled_projections": "whole",
        "timestep": "whole",
        "img_ids": ("image@ c", "b image@ c"),
        "txt_ids": ("text@ c", "b text@ c"),
        "guidance": "whole",
        "joint_attention_kwargs": {
            "scale": "whole",
            "attention_mask": "whole",
            "ip_adapter_image_embeds": "whole",
            "ip_hidden_states": "whole",
        },
        "controlnet_block_samples": "b image@ c",
        "controlnet_single_block_samples": "b image@ c",
        "return_dict": "whole",
        "controlnet_blocks_repeat": "whole",
    },
    leave={"proj_out": "b image@ c"},
    attention={"transformer_blocks.*.attn": JOINT, "single_transformer_blocks.*.attn": JOINT},
    refuse={
        "joint_attention_kwargs.ip_adapter_masks": Refusal(
            "a region mask is laid out over the whole image, a rank holds a part of it",
            "Leave the mask out, or undo() first",
        ),
    },
    cfg="calls",
    graph="root",
    blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
)
