"""InternVL 2 to 3.5, and Intern-S1."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.projectors.projector import (
    Kind,
    Projector,
    read_activation,
    read_epsilon,
    read_scale,
    read_tower,
    square,
)
from tgi_trio.model.gguf.stated import Values, read_count

_MERGE: Final = 2  # patches along a side of a token, where files do not say it
_LEAST, _MOST = 1, 12  # tiles of an image, where files do not say it
_BLOCK: Final = "vision_tower.encoder.layer.{}"
_KIND: Final = Kind("internvl")


def _describe(model: GgufModel, text: Values) -> Values:
    tower = read_tower(model)
    sides = {name: [tower[name]] * 2 for name in ("image_size", "patch_size")}
    merge = read_scale(model, _MERGE)
    return {
        "vision_config": tower
        | sides
        | {
            "attention_bias": "v.blk.0.attn_q.bias" in model.tensors,
            "use_qk_norm": "v.blk.0.attn_q_norm.weight" in model.tensors,
            "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in model.tensors else "rms_norm",
            "layer_norm_eps": read_epsilon(model, 1e-6),
            "hidden_act": read_activation(model, "gelu"),
        },
        "downsample_ratio": 1 / merge,
        "projector_hidden_act": "gelu",
    }


def _count_features(model: GgufModel) -> int:
    """Return the features of a tile."""
    tower, merge = read_tower(model), read_scale(model, _MERGE)
    along = tower["image_size"] // tower["patch_size"] // merge
    if not along:
        raise ValueError(f"its images are less than {merge} patches high")
    return int(along**2)


def _process(model: GgufModel) -> Values:
    return {
        "size": square(read_count(model, "vision.image_size")),
        "min_patches": read_count(model, "vision.preproc_min_tiles", default=_LEAST),
        "max_patches": read_count(model, "vision.preproc_max_tiles", default=_MOST),
    }


INTERNVL: Final = Projector(
    dict.fromkeys(("internlm2", "llama", "qwen2", "qwen3", "qwen3moe"), _KIND),
    _describe,
    _process,
    {
        "vision_tower.embeddings.cls_token": "v.class_embd",
        "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
        "vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
        f"{_BLOCK}.lambda_1": "v.blk.{}.ls1.weight",
        f"{_BLOCK}.lambda_2": "v.blk.{}.ls2.weight",
        f"{_BLOCK}.attention.q_proj": "v.blk.{}.attn_q",
        f"{_BLOCK}.attention.k_proj": "v.blk.{}.attn_k",
        f"{_BLOCK}.attention.v_proj": "v.blk.{}.attn_v",
        f"{_BLOCK}.attention.q_norm": "v.blk.{}.attn_q_norm",
        f"{_BLOCK}.attention.k_norm": "v.blk.{}.attn_k_norm",
        f"{_BLOCK}.attention.projection_layer": "v.blk.{}.attn_out",
        f"{_BLOCK}.mlp.fc1": "v.blk.{}.ffn_up",
        f"{_BLOCK}.mlp.fc2": "v.blk.{}.ffn_down",
        f"{_BLOCK}.layernorm_before": "v.blk.{}.ln1",
        f"{_BLOCK}.layernorm_after": "v.blk.{}.ln2",
        "multi_modal_projector.layer_norm": "mm.model.mlp.0",
        "multi_modal_projector.linear_1": "mm.model.mlp.1",
        "multi_modal_projector.linear_2": "mm.model.mlp.3",
    },
    ("mm.model.mlp.3.weight", 0),
    "<IMG_CONTEXT>",
    process_whole=lambda model: {"image_seq_length": _count_features(model)},
)
