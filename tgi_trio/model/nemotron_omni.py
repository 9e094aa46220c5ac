"""Nemotron 3 Nano Omni: what its config.json says in the words of transformers' class.

The files that NVIDIA published say some of it by other names, which that class translates, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

NEMOTRON_OMNI: Final = "nemotron_h_omni"
_NAMES: Final = {  # published name -> transformers'
    "img_context_token_id": "image_token_id",
    "llm_config": "text_config",
    "sound_config": "audio_config",
    "sound_context_token_id": "audio_token_id",
    "video_context_token_id": "video_token_id",
    "vit_hidden_size": "vision_hidden_size",
}
_SEEING: Final = (
    *("vision_config", "vision_hidden_size", "projector_hidden_size", "downsample_ratio"),
    "video_temporal_patch_size",
)
# Of the text, which that class does not compute, what its tower and projector follow from.
_FOLLOWED: Final = ("hidden_size", "num_nextn_predict_layers")
_TEXT: Final = {"model_type": "nemotron_h", "layers_block_type": ["mlp"], "intermediate_size": 1}


def name_as_transformers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json by transformers' names; of two, its own counts.

    Those of another type are returned as they are.
    """
    if values.get("model_type") != NEMOTRON_OMNI:
        return dict(values)
    named = {_NAMES[name]: value for name, value in values.items() if name in _NAMES}
    return {name: each for name, each in named.items() if each is not None} | {
        name: value for name, value in values.items() if name not in _NAMES and value is not None
    }


def describe_class(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers' class is configured with to have the tower and its projector.

    `values`: by transformers' names. Without what hears, whose published type is none of its own.
    """
    said = {name: values[name] for name in _SEEING if values.get(name) is not None}
    text = {name: values[name] for name in _FOLLOWED if values.get(name) is not None}
    return said | {"text_config": _TEXT | text}
