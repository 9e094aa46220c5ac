"""The families of models that hear: one table, for the router and for the shard.

A row has the feature extractor that prepares a sound, and its text in a prompt. How the text
attends to features is as of the family's images (`image_families.py`), but that no tokens of a
sound see those behind them; where models do not see, features are attended to as text is. No torch
in this file, since the router reads it.

Sources: transformers' feature extractors and processors of these families; of Ultravox
fixie-ai's processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class AudioFamily:
    """How a family handles sounds."""

    extractor: str  # a row of `media.feature_extractors.EXTRACTORS`
    layout: str  # a row of `router.media.layouts.audio.AUDIO_LAYOUTS`
    # Samples that its extractor takes, and cuts off what is behind them; 0: any number.
    most_samples: int = 0
    alone: bool = False  # models of this type do not see
    tower: str = "audio_config"  # what config.json says of its tower, under this name


_GRANITE: Final = AudioFamily(
    "granite_speech", "granite_speech", alone=True, tower="encoder_config"
)
# By `model_type` in config.json.
AUDIO_FAMILIES: Final[Mapping[str, AudioFamily]] = {
    "gemma3n": AudioFamily("gemma3n", "gemma3n", 480_000),
    "gemma4": AudioFamily("gemma4", "gemma4", 480_000),
    "gemma4_unified": AudioFamily("gemma4_unified", "gemma4_unified"),
    "glmasr": AudioFamily("glmasr", "glmasr", 21 * 480_000, alone=True),  # whole pieces in 655 s
    "granite_speech": _GRANITE,
    "granite_speech_plus": _GRANITE,
    "phi4_multimodal": AudioFamily("phi4", "phi4"),
    "qwen2_5_omni_thinker": AudioFamily("qwen2_5_omni", "qwen2_5_omni", 10 * 480_000),
    "qwen2_audio": AudioFamily("whisper", "qwen2_audio", 480_000, alone=True),
    "qwen3_asr": AudioFamily("qwen3_asr", "qwen3_asr", alone=True),
    "qwen3_omni_moe_thinker": AudioFamily("qwen3_omni", "qwen3_omni"),
    "ultravox": AudioFamily("ultravox", "ultravox", alone=True),
    "voxtral": AudioFamily("voxtral", "voxtral", alone=True),
}


def is_audio_only(config: Mapping[str, Any]) -> bool:
    """Return whether a model hears and does not see; `config`: its config.json."""
    family = AUDIO_FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.alone and bool(config.get(family.tower))


def find_audio_family(config: Mapping[str, Any]) -> AudioFamily:
    """Return the row of a model; `config`: its config.json.

    Raises ModelLoadError for a model type without a row, and where config.json says nothing of it.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in AUDIO_FAMILIES:
        raise ModelLoadError(
            f"the model type is {kind!r}, and served is audio of "
            f"{', '.join(sorted(AUDIO_FAMILIES))}"
        )
    family = AUDIO_FAMILIES[kind]
    if not config.get(family.tower):
        raise ModelLoadError(f"this model of its type has no {family.tower} in config.json")
    return family
