"""What a model's folder says about sounds: whether it hears any, and how."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.audio_families import find_audio_family
from tgi_trio.model.config import read_json
from tgi_trio.router.media.decoder import AudioDecoderSettings, DecodingBounds
from tgi_trio.router.media.layouts.audio import AUDIO_LAYOUTS
from tgi_trio.router.media.layouts.layout import ImageSettings, OtherLayout, Settings, read_int

# What processor_config.json has the settings of a feature extractor under.
_EXTRACTORS: Final = ("feature_extractor", "audio_processor")


@dataclass(frozen=True, slots=True)
class AudioModel:
    """How one model takes sounds."""

    extractor: str  # a key of `media.feature_extractors.EXTRACTORS`
    layout: OtherLayout
    processor: Mapping[str, Any]  # settings of its feature extractor
    sampling_rate: int = 16_000
    most_samples: int = 0  # as in `AudioFamily`

    def decoder_settings(self, bounds: DecodingBounds) -> AudioDecoderSettings:
        """Return how its sounds are decoded."""
        return AudioDecoderSettings(
            self.extractor,
            self.processor,
            max_seconds=bounds.max_audio_seconds,
            sampling_rate=self.sampling_rate,
            most_samples=self.most_samples,
        )

    def describe_longest(self, max_seconds: float) -> str:
        """Return the longest sound that may come and its extractor, as JSON for a shard."""
        samples = int(max_seconds * self.sampling_rate)
        longest = min(samples, self.most_samples or samples)
        told = {"family": self.extractor, "settings": dict(self.processor), "samples": longest}
        return json.dumps(told)


def find_audio_model(folder: Path, settings: ImageSettings) -> AudioModel:
    """Return how the model in a folder takes sounds; `settings`: of its images.

    Raises ModelLoadError if it takes none, or its settings cannot be used.
    """
    family = find_audio_family(settings.config)
    own = _find_own(folder, settings, family.tower)
    if own.get("dither"):
        raise ModelLoadError(
            "its feature extractor adds noise (dither), by which no two requests would hear the "
            "same"
        )
    if find_spec("av") is None:
        raise ModelLoadError("it needs PyAV, pip install 'tgi-trio[audio]'")
    rate = read_int(own, "sampling_rate", 16_000)
    told = read_json(folder / "tokenizer_config.json") or {}
    layout = AUDIO_LAYOUTS[family.layout](own, settings, told)
    return AudioModel(family.extractor, layout, dict(own), rate, family.most_samples)


def _find_own(folder: Path, settings: ImageSettings, tower: str) -> Settings:
    """Return the settings of a model's feature extractor.

    `tower`: as in `AudioFamily`. Where there are none they are its class's own, and as many numbers
    of a frame as Whisper's tower says that it reads.
    """
    for name in _EXTRACTORS:
        if isinstance(found := settings.processor.get(name), Mapping):
            return found
    # Files of before transformers 5 have them among others.
    if found := read_json(folder / "preprocessor_config.json"):
        return found
    told = settings.config.get(tower)
    bins = told.get("num_mel_bins") if isinstance(told, Mapping) else None
    return {} if bins is None else {"feature_size": bins}
