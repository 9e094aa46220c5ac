"""GLM-4.1V and the dense GLM-4.6V.

Files say nothing of an image's least and most pixels: they are those of the published models.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.projectors.projector import (
    FRAMES,
    LENGTH,
    Kind,
    Projector,
    count_blocks,
    count_heads,
    read_activation,
    read_epsilon,
    read_merge,
    read_patches,
    read_pixels,
    read_shape,
)
from tgi_trio.model.gguf.stated import Values, read_count

_PIXELS: Final = 112 * 112, 28 * 28 * 12288
_VIDEO_PIXELS: Final = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}
_BLOCK: Final = "visual.blocks.{}"


def _describe(model: GgufModel, text: Values) -> Values:
    return {
        "vision_config": {
            "depth": count_blocks(model),
            "hidden_size": read_count(model, LENGTH),
            "num_heads": count_heads(model),
            # Of what projects: MLPs of blocks are as wide as the text.
            "intermediate_size": read_shape(model, "mm.gate.weight", 2)[0],
            "out_hidden_size": text["hidden_size"],
            "image_size": read_count(model, "vision.image_size"),
            "patch_size": read_count(model, "vision.patch_size"),
            "spatial_merge_size": read_merge(model),
            "temporal_patch_size": FRAMES,
            "rms_norm_eps": read_epsilon(model, 1e-5),
            "hidden_act": read_activation(model, "gelu"),
        }
    }


def _process(model: GgufModel) -> Values:
    return read_patches(model) | {"size": read_pixels(model, *_PIXELS)}


def _process_video(model: GgufModel) -> Values:
    return read_patches(model) | {"size": dict(_VIDEO_PIXELS)}


GLM4V: Final = Projector(
    {"glm4": Kind("glm4v", "glm4v_text")},
    _describe,
    _process,
    {
        "visual.embeddings.position_embedding": "v.position_embd",
        "visual.patch_embed.proj": "v.patch_embd",
        "visual.post_conv_layernorm": "v.norm_embd",
        "visual.post_layernorm": "v.post_ln",
        "visual.downsample": "mm.patch_merger",
        f"{_BLOCK}.norm1": "v.blk.{}.ln1",
        f"{_BLOCK}.norm2": "v.blk.{}.ln2",
        f"{_BLOCK}.attn.qkv": "v.blk.{}.attn_qkv",
        f"{_BLOCK}.attn.proj": "v.blk.{}.attn_out",
        f"{_BLOCK}.mlp.gate_proj": "v.blk.{}.ffn_gate",
        f"{_BLOCK}.mlp.up_proj": "v.blk.{}.ffn_up",
        f"{_BLOCK}.mlp.down_proj": "v.blk.{}.ffn_down",
        "visual.merger.proj": "mm.model.fc",
        "visual.merger.post_projection_norm": "mm.post_norm",
        "visual.merger.gate_proj": "mm.gate",
        "visual.merger.up_proj": "mm.up",
        "visual.merger.down_proj": "mm.down",
    },
    ("mm.down.weight", 0),
    "<|image|>",
    {"visual.patch_embed.proj.weight": "frames"},
    process_video=_process_video,
)
