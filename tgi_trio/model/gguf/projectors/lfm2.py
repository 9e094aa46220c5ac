"""LFM2-VL. Files say nothing of tiles: they are cut as those of the published models."""

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
)
from tgi_trio.model.gguf.projectors.siglip import name_encoder
from tgi_trio.model.gguf.stated import Values, read_count

_MERGE: Final = 2  # patches along a side of a token, where files do not say it
_KIND: Final = Kind("lfm2_vl")


def _describe(model: GgufModel, text: Values) -> Values:
    tower = read_tower(model)
    del tower["image_size"]  # images are of any size
    return {
        "vision_config": tower
        | {
            "model_type": "siglip2_vision_model",
            "num_patches": read_shape(model, "v.position_embd.weight", 2)[0],
            "layer_norm_eps": read_epsilon(model, 1e-6),
            "hidden_act": read_activation(model, "gelu_pytorch_tanh"),
            "vision_use_head": False,
        },
        "downsample_factor": read_scale(model, _MERGE),
        "projector_hidden_size": read_shape(model, "mm.1.weight", 2)[0],
        "projector_bias": "mm.1.bias" in model.tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in model.tensors,
        "projector_hidden_act": "gelu",
    }


def _process(model: GgufModel) -> Values:
    return {
        "encoder_patch_size": read_count(model, "vision.patch_size"),
        "downsample_factor": read_scale(model, _MERGE),
    }


LFM2: Final = Projector(
    {"lfm2": _KIND, "lfm2moe": _KIND},
    _describe,
    _process,
    {
        **name_encoder("vision_tower"),
        "multi_modal_projector.layer_norm": "mm.input_norm",
        "multi_modal_projector.linear_1": "mm.1",
        "multi_modal_projector.linear_2": "mm.2",
    },
    ("mm.2.weight", 0),
    "<image>",
    {"vision_tower.embeddings.patch_embedding.weight": "pixels"},
)
