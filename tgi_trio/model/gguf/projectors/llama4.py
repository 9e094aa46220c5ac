"""Llama 4. Files say nothing of how many tiles an image is cut into: 16, as published."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.projectors.projector import (
    Kind,
    Projector,
    read_activation,
    read_epsilon,
    read_scale,
    read_shape,
    read_tower,
    square,
)
from tgi_trio.model.gguf.stated import Values, read_count

_MERGE: Final = 2  # patches along a side of a token, where files do not say it
_BLOCK: Final = "vision_model.model.layers.{}"
_ADAPTER: Final = "vision_model.vision_adapter.mlp"


def _describe(model: GgufModel, text: Values) -> Values:
    entry = read_shape(model, "mm.model.mlp.1.weight", 2)
    left = read_shape(model, "mm.model.mlp.2.weight", 2)[0]
    return {
        "vision_config": read_tower(model)
        | {
            "norm_eps": read_epsilon(model, 1e-5),
            "hidden_act": read_activation(model, "gelu"),
            "pixel_shuffle_ratio": 1 / read_scale(model, _MERGE),
            "projector_input_dim": entry[0],
            "projector_output_dim": left,
            "vision_output_dim": read_shape(model, "mm.model.fc.weight", 2)[1],
        }
    }


def _process(model: GgufModel) -> Values:
    return {"size": square(read_count(model, "vision.image_size"))}


def _process_whole(model: GgufModel) -> Values:
    return {
        "patch_size": read_count(model, "vision.patch_size"),
        "pixel_shuffle_ratio": 1 / read_scale(model, _MERGE),
    }


LLAMA4: Final = Projector(
    {"llama4": Kind("llama4")},
    _describe,
    _process,
    {
        "vision_model.class_embedding": "v.class_embd",
        "vision_model.positional_embedding_vlm": "v.position_embd.weight",
        "vision_model.patch_embedding.linear": "v.patch_embd",
        "vision_model.layernorm_pre": "v.pre_ln",
        "vision_model.layernorm_post": "v.post_ln",
        f"{_BLOCK}.self_attn.q_proj": "v.blk.{}.attn_q",
        f"{_BLOCK}.self_attn.k_proj": "v.blk.{}.attn_k",
        f"{_BLOCK}.self_attn.v_proj": "v.blk.{}.attn_v",
        f"{_BLOCK}.self_attn.o_proj": "v.blk.{}.attn_out",
        f"{_BLOCK}.mlp.fc1": "v.blk.{}.ffn_up",
        f"{_BLOCK}.mlp.fc2": "v.blk.{}.ffn_down",
        f"{_BLOCK}.input_layernorm": "v.blk.{}.ln1",
        f"{_BLOCK}.post_attention_layernorm": "v.blk.{}.ln2",
        f"{_ADAPTER}.fc1": "mm.model.mlp.1",
        f"{_ADAPTER}.fc2": "mm.model.mlp.2",
        "multi_modal_projector.linear_1": "mm.model.fc",
    },
    ("mm.model.fc.weight", 0),
    "<|patch|>",
    {"vision_model.patch_embedding.linear.weight": "flat"},
    process_whole=_process_whole,
)
