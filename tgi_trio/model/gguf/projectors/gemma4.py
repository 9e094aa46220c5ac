"""Gemma 4. Its larger models let an image's tokens see each other, which no file says."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.projectors.projector import (
    Kind,
    Projector,
    read_epsilon,
    read_scale,
    read_shape,
    read_tower,
)
from tgi_trio.model.gguf.stated import Values, read_count, read_number

_POOLING: Final = 3  # patches along a side of a token, where files do not say it
_MOST: Final = 280  # tokens of an image, as published
_BLOCK: Final = "vision_tower.encoder.layers.{}"
_PATCHES: Final = "vision_tower.patch_embedder.input_proj"
_LINEAR: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")
_MATRICES: Final = {
    f"{_BLOCK}.{ours}.linear": f"v.blk.{{}}.{theirs}" for ours, theirs in _LINEAR.items()
}
_LIMITS: Final = {
    f"{_BLOCK}.{ours}.{bound}": f"v.blk.{{}}.{theirs}.{bound}"
    for ours, theirs in _LINEAR.items()
    for bound in _BOUNDS
}


def _describe(model: GgufModel, text: Values) -> Values:
    tower = read_tower(model)
    (head,) = read_shape(model, "v.blk.0.attn_q_norm.weight", 1)
    keys = read_shape(model, "v.blk.0.attn_k.weight", 2)[0]
    del tower["image_size"]  # images are of any size
    seen = "vision" if not text.get("hidden_size_per_layer_input") else None
    return {
        "vision_config": tower
        | {
            "head_dim": head,
            "num_key_value_heads": keys // head,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": read_epsilon(model, 1e-6),
            "pooling_kernel_size": read_scale(model, _POOLING),
            "position_embedding_size": read_shape(model, "v.position_embd.weight", 3)[1],
            "standardize": "v.std_bias" in model.tensors,
            "use_clipped_linears": "v.blk.0.attn_q.input_max" in model.tensors,
            "rope_parameters": {
                "rope_type": "axial",
                "rope_theta": read_number(model, "rope.freq_base", 100.0),
            },
        },
        "audio_config": None,
        "text_config": {"use_bidirectional_attention": seen},
    }


def _process(model: GgufModel) -> Values:
    return {
        "patch_size": read_count(model, "vision.patch_size"),
        "pooling_kernel_size": read_scale(model, _POOLING),
        "max_soft_tokens": _MOST,
    }


GEMMA4: Final = Projector(
    {"gemma4": Kind("gemma4")},
    _describe,
    _process,
    {
        "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
        _PATCHES: "v.patch_embd",
        "vision_tower.std_bias": "v.std_bias",
        "vision_tower.std_scale": "v.std_scale",
        **_MATRICES,
        **_LIMITS,
        f"{_BLOCK}.self_attn.q_norm": "v.blk.{}.attn_q_norm",
        f"{_BLOCK}.self_attn.k_norm": "v.blk.{}.attn_k_norm",
        f"{_BLOCK}.input_layernorm": "v.blk.{}.ln1",
        f"{_BLOCK}.post_attention_layernorm": "v.blk.{}.attn_post_norm",
        f"{_BLOCK}.pre_feedforward_layernorm": "v.blk.{}.ln2",
        f"{_BLOCK}.post_feedforward_layernorm": "v.blk.{}.ffn_post_norm",
        "embed_vision.embedding_projection": "mm.input_projection",
    },
    ("mm.input_projection.weight", 0),
    "<|image|>",
    {f"{_PATCHES}.weight": "pixels"},
)
