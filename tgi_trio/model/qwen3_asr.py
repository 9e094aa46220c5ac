"""Qwen3-ASR as it was published first: what its config.json says, in transformers' words.

There it is the part of a model that also speaks, though it does not, and its text is of a type of
its own, which is Qwen3's where positions of three parts are one. Tensors' names differ as well
(`shard/media/spellings.py`). Source: the files of QwenLM's package, and transformers' class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

QWEN3_ASR: Final = "qwen3_asr"
_THINKER: Final = "qwen3_asr_thinker"
_TEXT: Final = "qwen3"
_OWN_TEXTS: Final = ("qwen3_asr_text", "qwen3_asr_thinker_text")


def name_as_transformers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json as transformers' class for this model has them.

    `values`: of the part that hears and writes. Those of another type are returned as they are.
    """
    if values.get("model_type") not in (QWEN3_ASR, _THINKER):
        return dict(values)
    found = {**values, "model_type": QWEN3_ASR}
    text = values.get("text_config")
    if isinstance(text, Mapping) and text.get("model_type", _OWN_TEXTS[0]) in _OWN_TEXTS:
        found["text_config"] = {**text, "model_type": _TEXT}
    return found


def describe_class(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers' class is configured with to have the tower and its projector.

    `values`: as they are named here. The text is not computed by that class.
    """
    layer = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    text = {"model_type": _TEXT, "hidden_size": values.get("hidden_size"), **layer}
    told = values.get("audio_config")
    tower = dict(told) if isinstance(told, Mapping) else {}
    return {"text_config": text, "audio_config": {**tower, "model_type": "qwen3_asr_encoder"}}
