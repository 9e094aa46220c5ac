"""Which feature extractor a family of models that hear has: always transformers' own, in numpy."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError

Arrays = dict[str, NDArray[Any]]
FEATURES: Final = "input_features"
MASK: Final = "input_features_mask"

# By family: the module below transformers.models, and the class.
EXTRACTORS: Final[Mapping[str, tuple[str, str]]] = {
    "gemma3n": ("gemma3n", "Gemma3nAudioFeatureExtractor"),
    "gemma4": ("gemma4", "Gemma4AudioFeatureExtractor"),
    "gemma4_unified": ("gemma4_unified", "Gemma4UnifiedAudioFeatureExtractor"),
}


class FeatureExtractor:
    """Makes of a sound what its model's tower reads."""

    def __init__(self, family: str, settings: Mapping[str, Any]) -> None:
        """`settings`: the model's own. Raises ModelLoadError."""
        if family not in EXTRACTORS:
            known = ", ".join(EXTRACTORS)
            raise ModelLoadError(f"no feature extractor is known of {family!r}, only of {known}")
        module, name = EXTRACTORS[family]
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
        self.sampling_rate = int(self._extract.sampling_rate)

    def extract(self, samples: NDArray[np.float32]) -> Arrays:
        """Return the arrays of a sound, float32 [samples] of `sampling_rate`.

        `input_features` float32 [1, T, width], and which of these T are of the sound and not of
        silence behind it: `input_features_mask` bool [1, T]. Raises ValueError if none is.
        """
        found = self._extract([samples], return_tensors="np")
        mask = np.asarray(found[MASK], np.bool_)
        if not mask.any():
            raise ValueError(f"it is too short for this model: {len(samples)} samples")
        return {FEATURES: np.ascontiguousarray(found[FEATURES], np.float32), MASK: mask}
