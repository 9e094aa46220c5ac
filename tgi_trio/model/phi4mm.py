"""Phi-4-multimodal as it was published first: what its config.json says, in transformers' words.

That type, `phi4mm`, is code of its own; transformers' class for the same model is another type. The
tensors' names differ as well (`published_names.py`, `shard/media/spellings.py`). Source: the
program of transformers that converts such folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

PHI4: Final = "phi4_multimodal"
_PUBLISHED: Final = "phi4mm"
# What is for its own code alone.
_LEFT_OUT: Final = frozenset(
    "architectures audio_processor embd_layer img_processor speech_lora vision_lora "
    "_attn_implementation _name_or_path".split()
)
_ENDS: Final = [199_999, 200_020]  # of a text, and of a turn
# The tower of sounds: names that are kept, and others with what they become.
_KEPT: Final = (
    *("activation", "chunk_size", "conv_activation", "conv_glu_type", "depthwise_multiplier"),
    *("dropout_rate", "ext_pw_out_channel", "input_size", "kernel_size", "left_chunk"),
    *("num_blocks", "time_reduction"),
)
_RENAMED: Final = {
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
    "linear_units": "intermediate_size",
}


def name_as_transformers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json as transformers' class for this model has them.

    Those of another type are returned as they are. Sections that the class knows stay, with what is
    said elsewhere on top: published files have none.
    """
    if values.get("model_type") != _PUBLISHED:
        return dict(values)
    tower = _find(values, "audio_processor", "config")
    sounds = {name: tower[name] for name in _KEPT if name in tower}
    sounds |= {other: tower[name] for name, other in _RENAMED.items() if name in tower}
    for other, place in (
        ("nemo_conv_channels", ("nemo_conv_settings", "conv_channels")),
        ("bias_max_distance", ("relative_attention_bias_args", "t5_bias_max_distance")),
    ):
        section, name = place
        if name in (found := _find(tower, section)):
            sounds[other] = found[name]
    rate = _find(values, "embd_layer", "audio_embd_layer").get("downsample_rate", 1)
    crop = _find(values, "embd_layer", "image_embd_layer").get("crop_size", 448)
    return {
        **{name: value for name, value in values.items() if name not in _LEFT_OUT},
        "model_type": PHI4,
        "eos_token_id": _ENDS,
        "audio_config": {**_find(values, "audio_config"), **sounds, "downsample_rate": rate},
        "vision_config": {**_find(values, "vision_config"), "crop_size": crop},
    }


def _find(values: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return a section below these names, {} if there is none."""
    for name in names:
        found = values.get(name)
        values = found if isinstance(found, Mapping) else {}
    return values
