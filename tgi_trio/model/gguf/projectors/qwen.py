"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen 3.5.

Files say nothing of an image's least and most pixels: they are those of the published models.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.projectors.projector import (
    FRAMES,
    LENGTH,
    Kind,
    Names,
    Projector,
    count_blocks,
    count_heads,
    find_deep_blocks,
    read_activation,
    read_merge,
    read_patches,
    read_pixels,
    read_shape,
)
from tgi_trio.model.gguf.stated import Values, read_count

_PLACEHOLDER: Final = "<|image_pad|>"
_PIXELS: Final = 56 * 56, 28 * 28 * 16384
_NEWER_PIXELS: Final = 256 * 256, 4096 * 4096  # since Qwen3-VL
_NEWER_VIDEO_PIXELS: Final = {"shortest_edge": 4096, "longest_edge": 25165824}  # of all frames
_WINDOW: Final = 112  # pixels, the side of a window of Qwen2.5-VL
_PATCHES: Final = "visual.patch_embed.proj.weight"

_BLOCK: Final[Names] = {
    "visual.patch_embed.proj": "v.patch_embd",
    "visual.blocks.{}.norm1": "v.blk.{}.ln1",
    "visual.blocks.{}.norm2": "v.blk.{}.ln2",
    "visual.blocks.{}.attn.qkv": ("v.blk.{}.attn_q", "v.blk.{}.attn_k", "v.blk.{}.attn_v"),
    "visual.blocks.{}.attn.proj": "v.blk.{}.attn_out",
}
_MERGER: Final[Names] = {
    "visual.merger.ln_q": "v.post_ln",
    "visual.merger.mlp.0": "mm.0",
    "visual.merger.mlp.2": "mm.2",
}
_QWEN2: Final[Names] = {
    **_BLOCK,
    **_MERGER,
    "visual.blocks.{}.mlp.fc1": "v.blk.{}.ffn_up",
    "visual.blocks.{}.mlp.fc2": "v.blk.{}.ffn_down",
}
_QWEN25: Final[Names] = {
    **_BLOCK,
    **_MERGER,
    "visual.blocks.{}.mlp.gate_proj": "v.blk.{}.ffn_gate",
    "visual.blocks.{}.mlp.up_proj": "v.blk.{}.ffn_up",
    "visual.blocks.{}.mlp.down_proj": "v.blk.{}.ffn_down",
}
_QWEN3: Final[Names] = {
    **_BLOCK,
    "visual.pos_embed": "v.position_embd",
    "visual.blocks.{}.attn.qkv": "v.blk.{}.attn_qkv",
    "visual.blocks.{}.mlp.linear_fc1": "v.blk.{}.ffn_up",
    "visual.blocks.{}.mlp.linear_fc2": "v.blk.{}.ffn_down",
    "visual.merger.norm": "v.post_ln",
    "visual.merger.linear_fc1": "mm.0",
    "visual.merger.linear_fc2": "mm.2",
    # `{}`: of those that have one, numbered by the block whose output they read
    "visual.deepstack_merger_list.{}.norm": "v.deepstack.{}.norm",
    "visual.deepstack_merger_list.{}.linear_fc1": "v.deepstack.{}.fc1",
    "visual.deepstack_merger_list.{}.linear_fc2": "v.deepstack.{}.fc2",
}


def _describe_qwen2(model: GgufModel, text: Values) -> Values:
    length = read_count(model, LENGTH)
    width = read_shape(model, "v.blk.0.ffn_up.weight", 2)
    return {
        "vision_config": _grid(model)
        | {
            "embed_dim": length,
            "hidden_size": text["hidden_size"],
            "mlp_ratio": max(width) // length,
            "hidden_act": read_activation(model, "gelu"),
        }
    }


def _describe_qwen25(model: GgufModel, text: Values) -> Values:
    blocks = count_blocks(model)
    every = model.get("vision.n_wa_pattern")
    if not isinstance(every, int) or isinstance(every, bool) or every < 0:
        raise ValueError(f"its clip.vision.n_wa_pattern cannot be {every!r}")
    every = every or 1  # 0: no block has windows
    return {
        "vision_config": _grid(model)
        | {
            "hidden_size": read_count(model, LENGTH),
            "intermediate_size": read_count(model, "vision.feed_forward_length"),
            "out_hidden_size": text["hidden_size"],
            "fullatt_block_indexes": list(range(every - 1, blocks, every)),
            "window_size": read_count(model, "vision.window_size", default=_WINDOW),
            "tokens_per_second": 2,
            "hidden_act": read_activation(model, "gelu"),
        }
    }


def _describe_qwen3(model: GgufModel, text: Values) -> Values:
    return {
        "vision_config": _grid(model)
        | {
            "hidden_size": read_count(model, LENGTH),
            "intermediate_size": read_count(model, "vision.feed_forward_length"),
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": read_shape(model, "v.position_embd.weight", 2)[0],
            "deepstack_visual_indexes": find_deep_blocks(model),
            "hidden_act": read_activation(model, "gelu_pytorch_tanh"),
        }
    }


def _grid(model: GgufModel) -> Values:
    return {
        "depth": count_blocks(model),
        "num_heads": count_heads(model),
        "in_channels": 3,
        "patch_size": read_count(model, "vision.patch_size"),
        "spatial_merge_size": read_merge(model),
        "temporal_patch_size": FRAMES,
    }


def _process(model: GgufModel) -> Values:
    return read_patches(model) | {"size": read_pixels(model, *_PIXELS)}


def _process_newer(model: GgufModel) -> Values:
    return read_patches(model) | {"size": read_pixels(model, *_NEWER_PIXELS)}


def _process_newer_video(model: GgufModel) -> Values:
    return read_patches(model) | {"size": dict(_NEWER_VIDEO_PIXELS)}


QWEN2: Final = Projector(
    {"qwen2vl": Kind("qwen2_vl", "qwen2_vl_text")},
    _describe_qwen2,
    _process,
    _QWEN2,
    ("mm.2.weight", 0),
    _PLACEHOLDER,
    {_PATCHES: "frames"},
)
QWEN25: Final = Projector(
    {"qwen2vl": Kind("qwen2_5_vl", "qwen2_5_vl_text")},
    _describe_qwen25,
    _process,
    _QWEN25,
    ("mm.2.weight", 0),
    _PLACEHOLDER,
    {_PATCHES: "frames"},
)
QWEN3: Final = Projector(
    {
        "qwen3vl": Kind("qwen3_vl", "qwen3_vl_text"),
        "qwen3vlmoe": Kind("qwen3_vl_moe", "qwen3_vl_moe_text"),
        "qwen35": Kind("qwen3_5"),
        "qwen35moe": Kind("qwen3_5_moe"),
    },
    _describe_qwen3,
    _process_newer,
    _QWEN3,
    ("mm.2.weight", 0),
    _PLACEHOLDER,
    {_PATCHES: "frames"},
    process_video=_process_newer_video,
)
