"""Which feature extractor a family of models that hear has: transformers' own, if in numpy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.images import BESIDE_IMAGES, SOUND, SOUND_MASK
from tgi_trio.media.log_mels import GraniteMels, LogMels, Phi4Mels

Arrays = dict[str, NDArray[Any]]


class Extractor(NamedTuple):
    """One of transformers' classes."""

    module: str  # below transformers.models
    name: str
    mask: str = SOUND_MASK  # what it calls the mask
    given: Mapping[str, Any] = MappingProxyType({})  # with each sound
    fewest: int = 1  # frames of the shortest sound that a tower has a feature of
    piece: int = (
        0  # samples: of longer sounds, pieces of so many are heard apart; 0: there are none
    )
    cut: bool = False  # silence that is added behind a sound is not kept
    frames: int = (
        0  # of each piece that is heard apart, the last filled up by silence that is heard
    )
    context: int = 0  # frames of a piece of a longer sound, the last filled up by what is not heard
    least: int = 0  # samples: shorter sounds are filled up by silence that is heard


_WHISPER: Final = Extractor(
    *("whisper", "WhisperFeatureExtractor", "attention_mask"),
    {"return_attention_mask": True, "padding": "max_length", "sampling_rate": 16_000},
    fewest=3,
)
# By family. Whisper's encoder hears 30 s of any sound, most of which may be silence.
EXTRACTORS: Final[Mapping[str, Extractor]] = {
    "gemma3n": Extractor("gemma3n", "Gemma3nAudioFeatureExtractor"),
    "gemma4": Extractor("gemma4", "Gemma4AudioFeatureExtractor"),
    "gemma4_unified": Extractor("gemma4_unified", "Gemma4UnifiedAudioFeatureExtractor"),
    "glmasr": _WHISPER._replace(fewest=7, piece=480_000),
    "qwen2_5_omni": _WHISPER._replace(cut=True),
    "qwen3_asr": _WHISPER._replace(
        given={**_WHISPER.given, "padding": "longest", "truncation": False}, fewest=1, least=8000
    ),
    "qwen3_omni": _WHISPER._replace(
        given={**_WHISPER.given, "padding": "longest", "truncation": False}, fewest=1
    ),
    "ultravox": _WHISPER._replace(
        given={
            **{"return_attention_mask": True, "padding": "longest", "sampling_rate": 16_000},
            **{"truncation": False, "pad_to_multiple_of": 160},
        },
        fewest=1,
        context=3000,
        least=320,
    ),
    "voxtral": _WHISPER._replace(
        given={
            **{"return_attention_mask": True, "padding": "longest", "sampling_rate": 16_000},
            **{"truncation": False, "pad_to_multiple_of": 480_000},
        },
        fewest=1,
        frames=3000,
    ),
    "whisper": _WHISPER,
}
# Likewise, of those that are ours; `settings`: the model's own.
LOG_MELS: Final[Mapping[str, Callable[[Mapping[str, Any]], LogMels]]] = {
    "granite_speech": GraniteMels,
    "phi4": Phi4Mels,
}


class FeatureExtractor:
    """Makes of a sound what its model's tower reads."""

    def __init__(self, family: str, settings: Mapping[str, Any]) -> None:
        """`settings`: the model's own. Raises ModelLoadError."""
        self._mels = LOG_MELS[family](settings) if family in LOG_MELS else None
        if self._mels is not None:
            self.sampling_rate = self._mels.sampling_rate
            return
        if family not in EXTRACTORS:
            known = ", ".join((*EXTRACTORS, *LOG_MELS))
            raise ModelLoadError(f"no feature extractor is known of {family!r}, only of {known}")
        self._row = EXTRACTORS[family]
        module, name, *_ = self._row
        path = f"transformers.models.{module}.feature_extraction_{module}"
        try:
            made = getattr(importlib.import_module(path), name)
            self._extract = made.from_dict(dict(settings))
        except (ImportError, AttributeError) as error:
            raise ModelLoadError(f"the installed transformers has no {name}: {error}") from error
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ModelLoadError(
                f"the settings of the feature extractor cannot be used: {error}"
            ) from error
        if hasattr(self._extract, "_np_extract_fbank_features"):
            # Whisper's computes with torch where it can be imported: here always as without it.
            self._extract._torch_extract_fbank_features = self._extract._np_extract_fbank_features
        self.sampling_rate = int(self._extract.sampling_rate)

    def extract(self, samples: NDArray[np.float32], beside: bool = False) -> Arrays:
        """Return the arrays of a sound, float32 [samples] of `sampling_rate`.

        `beside`: its prompt has images, and its layout says that it is heard otherwise then.
        `input_features` float32 [1, T, width], of Whisper's [pieces, width, T], and which of these
        T are of the sound and not of silence behind it: `input_features_mask` bool [1, T] or
        [pieces, T]. Raises ValueError if too few are.
        """
        if self._mels is not None:
            return _extract_mels(self._mels, samples, beside)
        samples = np.pad(samples, (0, max(0, self._row.least - len(samples))))
        step = self._row.piece or len(samples)
        parts = [samples[begin : begin + step] for begin in range(0, len(samples), step)]
        given = {**self._row.given, **self._limit_silence(len(samples))}
        mask = np.zeros((1, 0), np.bool_)
        if len(samples) >= getattr(self._extract, "hop_length", 0):  # there is a window of it
            found = self._extract(parts, return_tensors="np", **given)
            mask = np.asarray(found[self._row.mask], np.bool_)
        if mask.sum() < self._row.fewest:
            raise _too_short(samples)
        features = np.asarray(found[SOUND])
        if self._row.frames:
            pieces = features[0].reshape(features.shape[1], -1, self._row.frames)
            features = pieces.swapaxes(0, 1)
            mask = np.ones((len(features), self._row.frames), np.bool_)
        if (context := self._row.context) and features.shape[-1] > context:
            features, mask = _cut_pieces(features[0], context), _cut_pieces(mask, context)[:, 0]
        if self._row.cut:
            count = int(mask.sum())
            features, mask = features[..., :count], mask[:, :count]
        return {SOUND: np.ascontiguousarray(features, np.float32), SOUND_MASK: mask}

    def _limit_silence(self, samples: int) -> dict[str, int]:
        """Return the length to which a sound is filled up, where silence behind it is not kept.

        The last windows of the sound reach into it, and all others are of zeros alone, which change
        nothing of what is kept.
        """
        if not self._row.cut:
            return {}
        hop = int(self._extract.hop_length)
        beyond = -(-(samples + 2 * int(self._extract.n_fft)) // hop) * hop
        return {"max_length": min(int(self._extract.n_samples), beyond)}


def _cut_pieces(values: NDArray[Any], length: int) -> NDArray[Any]:
    """Return values [width, T] as pieces [pieces, width, length], the last filled up by zeros."""
    missing = -values.shape[1] % length
    filled = np.pad(values, ((0, 0), (0, missing)))
    return filled.reshape(len(values), -1, length).swapaxes(0, 1)


def _extract_mels(mels: LogMels, samples: NDArray[np.float32], beside: bool) -> Arrays:
    """Return the arrays of a sound as `FeatureExtractor.extract` does; all frames are of it."""
    if len(samples) < mels.fewest:
        raise _too_short(samples)
    features = mels.extract(samples)[None]
    found: Arrays = {SOUND: features, SOUND_MASK: np.ones(features.shape[:2], np.bool_)}
    if beside:
        found[BESIDE_IMAGES] = np.ones(1, np.uint8)
    return found


def _too_short(samples: NDArray[np.float32]) -> ValueError:
    """Return the error for a sound of which a model hears nothing."""
    return ValueError(f"it is too short for this model: {len(samples)} samples")
