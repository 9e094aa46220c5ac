"""DeepSeek-OCR and its successor as they are published: their config.json in transformers' words.

Both share a type with another model, `deepseek_vl_v2`, and are told by `architectures`; their own
code is not run. transformers has a class for the successor, and one for Unlimited-OCR, which is the
first with a window in its text: without one both are the same. Tensors' names differ as well
(`shard/media/spellings.py`).
Sources: the configuration and modeling files of both models, and transformers' classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.published_type import PUBLISHED_TYPE, Pictures

_TYPE: Final = "deepseek_vl_v2"
_FIRST: Final = "unlimited_ocr"
# Their architectures -> transformers' classes.
_CLASSES: Final = {
    "DeepseekOCRForCausalLM": _FIRST,
    "DeepseekOCR2ForCausalLM": "deepseek_ocr2",
}
_TEXT: Final = "deepseek"  # attention as Llama's
_LATENT_TEXT: Final = "deepseek_v2"
# What is for its own code alone, or for the tower.
_LEFT_OUT: Final = frozenset(
    "architectures auto_map language_config projector_config vision_config tile_tag "
    "candidate_resolutions global_view_pos _name_or_path".split()
)
# The second tower of DeepSeek-OCR 2, of which config.json says the width alone: Qwen2 0.5B.
_QWEN2: Final = {
    **{"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    **{"intermediate_size": 4864, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_MLP: Final = 4  # widths of a tower's MLP over its own
_MOST_LAYERS: Final = 4096


def name_as_transformers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json as transformers' class for this model has them.

    Those of another model are returned as they are. What says how its towers are stays as it is.
    """
    kinds = [_CLASSES[name] for name in _list_texts(values, "architectures") if name in _CLASSES]
    if values.get("model_type") != _TYPE or not kinds:
        return dict(values)
    said = values.get("language_config")
    text = {
        name: value
        for name, value in (said if isinstance(said, Mapping) else values).items()
        if name not in _LEFT_OUT
    }
    tower = values.get("vision_config")
    return {
        **{name: value for name, value in values.items() if name not in _LEFT_OUT},
        **{"model_type": kinds[0], PUBLISHED_TYPE: _TYPE},
        "vision_config": dict(tower) if isinstance(tower, Mapping) else {},
        "text_config": {**text, "model_type": _LATENT_TEXT if text.get("use_mla") else _TEXT},
    }


def is_published(values: Mapping[str, Any]) -> bool:
    """Return whether values, as they are named here, are of a folder as it is published."""
    return values.get(PUBLISHED_TYPE) == _TYPE


def describe_class(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers' class is configured with to have the towers and their projector.

    `values`: as they are named here. The text, which is not computed by that class, is one of no
    more than the width of the projector's result. Raises ModelLoadError for towers that it lacks.
    """
    tower = _section(values, "vision_config")
    parts = _section(tower, "width")
    first = values.get("model_type") == _FIRST
    sam = _section(parts, "sam_vit_b")
    other = _section(parts, "clip-l-14-224" if first else "qwen2-0-5b")
    wide, narrow = _count(sam, "width"), _count(other, "width" if first else "dim")
    middle = sam.get("downsample_channels")
    if not isinstance(middle, list) or len(middle) != 2 or not all(map(_is_count, middle)):
        raise ModelLoadError(f"config.json says downsample_channels {middle!r}: served are two")
    told = {
        **{"hidden_size": wide, "mlp_dim": _MLP * wide, "image_size": tower.get("image_size")},
        **{"num_hidden_layers": _count(sam, "layers"), "num_attention_heads": _count(sam, "heads")},
        "global_attn_indexes": sam.get("global_attn_indexes"),
        # The last channels are what the second tower reads, whatever config.json says.
        "downsample_channels": [middle[0], narrow],
    }
    second = {"hidden_size": narrow, **_QWEN2}
    if first:
        second = {
            **{"hidden_size": narrow, "intermediate_size": _MLP * narrow},
            "num_hidden_layers": _count(other, "layers"),
            "num_attention_heads": _count(other, "heads"),
            **{name: other.get(name) for name in ("image_size", "patch_size")},
        }
    layer = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    kinds = {"mlp_layer_types": ["dense"], **({"layer_types": ["full_attention"]} if first else {})}
    return {
        "vision_config": {"sam_config": told, "encoder_config": second},
        "text_config": {"hidden_size": values.get("hidden_size"), **layer, **kinds},
    }


def find_pictures(values: Mapping[str, Any]) -> Pictures:
    """Return how images are made, as their own code makes them if it is asked for nothing else.

    `values`: as they are named here. DeepSeek calls that of the first one "Gundam".
    """
    first = values.get("model_type") == _FIRST
    side = {"height": 1024, "width": 1024}
    tiles = {"tile_size": 640 if first else 768, "min_patches": 2, "max_patches": 9 if first else 6}
    numbers = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
    return Pictures({"size": side, **tiles, "resample": 3, **numbers}, {})


def _list_texts(values: Mapping[str, Any], name: str) -> list[str]:
    found = values.get(name)
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def _count(values: Mapping[str, Any], name: str) -> int:
    """Return a number of a tower; raises ModelLoadError."""
    found: Any = values.get(name)
    most = _MOST_LAYERS if name == "layers" else 2**16
    if not _is_count(found) or found > most:
        raise ModelLoadError(
            f"config.json says {name} {found!r} of a tower, which is no positive number up to "
            f"{most}"
        )
    return int(found)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
