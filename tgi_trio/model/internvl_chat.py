"""InternVL as it is published: what its config.json says, in the words of transformers' class.

That type, `internvl_chat`, is code of its own; transformers' class for the same model is another,
`internvl`, whose folders are published beside these (`-hf`). How an image is cut is said by
config.json here, and by the image processor's file there. Tensors' names differ as well
(`shard/media/spellings.py`).
Sources: OpenGVLab's configuration and modeling files, and the examples of its model cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.published_type import PUBLISHED_TYPE, Pictures

INTERNVL_CHAT: Final = "internvl_chat"
_TYPE: Final = "internvl"
# What is for its own code alone, or said of the text as well.
_LEFT_OUT: Final = frozenset(
    "architectures auto_map hidden_size llm_config tie_word_embeddings _name_or_path".split()
)
# What its configuration classes have where a file says nothing: of the whole, and of the tower.
_DEFAULTS: Final = {
    **{"downsample_ratio": 0.5, "ps_version": "v1", "select_layer": -1, "use_thumbnail": False},
    **{"dynamic_image_size": False, "min_dynamic_patch": 1, "max_dynamic_patch": 6},
    **{"pad2square": False, "use_backbone_lora": 0, "use_llm_lora": 0},
}
_TOWER: Final = {
    **{"hidden_size": 3200, "num_hidden_layers": 48, "num_attention_heads": 25},
    **{"intermediate_size": 12800, "image_size": 224, "patch_size": 14, "num_channels": 3},
    **{"hidden_act": "gelu", "norm_type": "rms_norm", "layer_norm_eps": 1e-6},
    **{"qkv_bias": False, "qk_normalization": True},
}
_RENAMED: Final = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm"}
_TOWERS: Final = ("intern_vit_6b",)  # the type of all of them, also of those of 300M
_EPSILON: Final = 1e-6  # of its norms of queries and keys in transformers
_MOST_PIXELS: Final = 2**14  # of a tile's side
# With what its code ends an answer, by `template`: others are not known.
_ENDS: Final = {
    **dict.fromkeys(("Hermes-2", "internlm2-chat", "internvl2_5"), "<|im_end|>"),
    "phi3-chat": "<|end|>",
}
_MEAN: Final = (0.485, 0.456, 0.406)  # ImageNet's
_DEVIATION: Final = (0.229, 0.224, 0.225)


def name_as_transformers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json as transformers' class for this model has them.

    Those of another type are returned as they are. What says how images are made stays as it is.
    """
    if values.get("model_type") != INTERNVL_CHAT:
        return dict(values)
    text, tower = (_section(values, name) for name in ("llm_config", "vision_config"))
    found = {name: value for name, value in values.items() if name not in _LEFT_OUT}
    found |= {"model_type": _TYPE, PUBLISHED_TYPE: INTERNVL_CHAT}
    if tower:
        found["vision_config"] = _name_tower(tower)
    if text:
        found["text_config"] = text
    whole = {**_DEFAULTS, **values}
    return {
        **found,
        "downsample_ratio": whole["downsample_ratio"],
        "vision_feature_layer": whole["select_layer"],
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }


def is_published(values: Mapping[str, Any]) -> bool:
    """Return whether values, as they are named here, are of a folder as it is published."""
    return values.get(PUBLISHED_TYPE) == INTERNVL_CHAT


def describe_class(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers' class is configured with to have the tower and its projector.

    `values`: as they are named here. The text, which is not computed by that class, is one of no
    more than the width of the projector's result.
    """
    layer = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    text = {"model_type": "qwen2", "hidden_size": values.get("hidden_size"), **layer}
    names = ("vision_config", "downsample_ratio", "vision_feature_layer")
    return {name: values[name] for name in names} | {"text_config": text}


def find_end(values: Mapping[str, Any]) -> str:
    """Return the token with which its code ends an answer, "" if none is known.

    `values`: as they are named here.
    """
    template = values.get("template") if is_published(values) else None
    return _ENDS.get(template, "") if isinstance(template, str) else ""


def find_pictures(values: Mapping[str, Any]) -> Pictures:
    """Return how images are made, as the examples of its model cards make them.

    `values`: as they are named here. Raises ModelLoadError for what would be made otherwise.
    """
    whole, tower = {**_DEFAULTS, **values}, _section(values, "vision_config")
    _check(whole, tower)
    patch, size = tower["patch_size"], tower["image_size"]
    side = whole.get("force_image_size") or size
    most = whole["max_dynamic_patch"] if whole["dynamic_image_size"] else 1
    numbers = {
        **{"patch_size": patch, "image_size": size, "force_image_size": side},
        **{"min_dynamic_patch": whole["min_dynamic_patch"], "max_dynamic_patch": most},
    }
    for name, number in numbers.items():
        if not _is_count(number):
            raise ModelLoadError(f"config.json says {name} {number!r}, which is no positive number")
    ratio = whole["downsample_ratio"]
    if not isinstance(ratio, float) or not 0 < ratio <= 1 or 1 / ratio != int(1 / ratio):
        raise ModelLoadError(f"config.json says downsample_ratio {ratio!r}, which is no 1 / N")
    if side != size or side % (patch * int(1 / ratio)):
        raise ModelLoadError(
            f"config.json says force_image_size {side}, and image_size {size} of its tower, with "
            f"patches of {patch} and downsample_ratio {ratio}: served are equal ones that are a "
            "multiple of these"
        )
    image_processor = {
        **{"size": {"height": side, "width": side}, "resample": 3, "crop_to_patches": True},
        **{"min_patches": min(numbers["min_dynamic_patch"], most), "max_patches": most},
        **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
        **{"image_mean": list(_MEAN), "image_std": list(_DEVIATION)},
    }
    features = (side // patch) ** 2 // int(1 / ratio) ** 2
    return Pictures(
        image_processor,
        {"image_seq_length": features, "video_processor": {**image_processor, "num_frames": 8}},
    )


def _check(whole: Mapping[str, Any], tower: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for what its code computes and transformers' class does not."""
    dynamic = bool(whole["dynamic_image_size"])
    said = [
        ("ps_version", whole["ps_version"], ("v2",)),
        ("use_thumbnail", bool(whole["use_thumbnail"]) or not dynamic, (True,)),
        ("pad2square", bool(whole["pad2square"]), (False,)),
        ("use_backbone_lora", whole["use_backbone_lora"] or 0, (0,)),
        ("use_llm_lora", whole["use_llm_lora"] or 0, (0,)),
        ("the model_type of its vision_config", tower.get("model_type"), ("internvl_vision",)),
        ("norm_type", tower.get("norm_type"), ("layer_norm", "rms_norm")),
    ]
    if tower.get("use_qk_norm"):
        said.append(("layer_norm_eps", tower.get("layer_norm_eps"), (_EPSILON,)))
    for name, found, served in said:
        if found not in served:
            raise ModelLoadError(
                f"config.json says {name} {found!r} for {INTERNVL_CHAT}; served is "
                f"{' or '.join(map(repr, served))}"
            )


def _name_tower(tower: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tower's values; one of another type keeps its type, and is refused by it."""
    kind = tower.get("model_type", _TOWERS[0])
    moe = bool(tower.get("use_moe"))  # experts, which no published tower has
    named = "internvl_vision" if kind in _TOWERS and not moe else f"{kind}{' with experts' * moe}"
    told = {name: tower.get(name, value) for name, value in _TOWER.items()}
    return {_RENAMED.get(name, name): value for name, value in told.items()} | {"model_type": named}


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_PIXELS
