"""Pixtral, and Mistral Small 3.1 and later, which merge patches before they project them."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.projectors.projector import (
    Kind,
    Projector,
    count_heads,
    read_activation,
    read_tower,
    square,
)
from tgi_trio.model.gguf.stated import Values, read_count, read_number

_WITHOUT_MERGING: Final = "llava"  # the type of Pixtral 12B
_BLOCK: Final = "vision_tower.transformer.layers.{}"
_LAYER: Final = f"{_BLOCK}.attention"


def _describe(model: GgufModel, text: Values) -> Values:
    tower = read_tower(model) | {
        "model_type": "pixtral",
        "head_dim": read_count(model, "vision.embedding_length") // count_heads(model),
        "hidden_act": read_activation(model, "gelu"),
        "rope_theta": read_number(model, "rope.freq_base", 10000.0),
    }
    whole: Values = {
        "vision_config": tower,
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": "mm.1.bias" in model.tensors,
    }
    if "mm.patch_merger.weight" in model.tensors:
        return whole | {"spatial_merge_size": read_count(model, "vision.spatial_merge_size")}
    return whole | {"model_type": _WITHOUT_MERGING, "vision_feature_select_strategy": "full"}


def _process(model: GgufModel) -> Values:
    """The longest side is the tower's image size, as in the published files."""
    return {
        "patch_size": square(read_count(model, "vision.patch_size")),
        "size": {"longest_edge": read_count(model, "vision.image_size")},
    }


PIXTRAL: Final = Projector(
    {"llama": Kind("mistral3"), "mistral3": Kind("mistral3")},
    _describe,
    _process,
    {
        "vision_tower.patch_conv": "v.patch_embd",
        "vision_tower.ln_pre": "v.pre_ln",
        f"{_BLOCK}.attention_norm": "v.blk.{}.ln1",
        f"{_BLOCK}.ffn_norm": "v.blk.{}.ln2",
        f"{_BLOCK}.feed_forward.gate_proj": "v.blk.{}.ffn_gate",
        f"{_BLOCK}.feed_forward.up_proj": "v.blk.{}.ffn_up",
        f"{_BLOCK}.feed_forward.down_proj": "v.blk.{}.ffn_down",
        f"{_LAYER}.q_proj": "v.blk.{}.attn_q",
        f"{_LAYER}.k_proj": "v.blk.{}.attn_k",
        f"{_LAYER}.v_proj": "v.blk.{}.attn_v",
        f"{_LAYER}.o_proj": "v.blk.{}.attn_out",
        "multi_modal_projector.norm": "mm.input_norm",
        "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
        "multi_modal_projector.linear_1": "mm.1",
        "multi_modal_projector.linear_2": "mm.2",
    },
    ("mm.2.weight", 0),
    "[IMG]",
    {f"{_LAYER}.q_proj.weight": "pairs", f"{_LAYER}.k_proj.weight": "pairs"},
    unread=("v.token_embd.img_break",),
)
