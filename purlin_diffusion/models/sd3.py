"""Stable Diffusion 3 and 3.5: image and text tokens joined, image first; 3.5-medium has a second attention over the image alone.

The image is cut behind its patch embedding and not at the first block, which skip-layer guidance may skip.
"""

from purlin_diffusion.plan import Plan, Refusal, Segment

PLAN = Plan(
    model="SD3Transformer2DModel",
    written_for="0.42.1",
    segments=(Segment("image"), Segment("text")),
    forward={
        "hidden_states": "b c h w",
        "encoder_hidden_states": "b text@ c",
        "pooled_projections": "b c",
        "timestep": "b",
        "block_controlnet_hidden_states": "b image@ c",
        "joint_attention_kwargs": {
            "scale": "whole",
            "ip_adapter_image_embeds": "b n c",
            "ip_hidden_states": "b n c",
            "temb": "b c",
        },
        "return_dict": "whole",
        "skip_layers": "whole",
    },
    enter={"pos_embed ->": {0: "b image@ c"}},
    leave={"proj_out": "b image@ c"},
    attention={
        # the second call is the IP-Adapter's: image keys, then its own, which every rank has
        "transformer_blocks.*.attn": ("image@ text@", "image@ -> image@ *"),
        "transformer_blocks.*.attn2?": ("image@", "image@ -> image@ *"),
    },
    refuse={
        "joint_attention_kwargs.ip_adapter_masks": Refusal(
            "a region mask is laid out over the whole image, a rank holds a part of it",
            "Leave the mask out, or undo() first",
        ),
    },
    cfg="batched",
    output="b c h w",
    rowwise=(
        "JointAttnProcessor2_0",
        "FusedJointAttnProcessor2_0",
        "XFormersJointAttnProcessor",
        "SD3IPAdapterJointAttnProcessor2_0",
    ),
    graph="root",
    blocks=("JointTransformerBlock",),
)
