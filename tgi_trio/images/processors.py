"""Which of transformers' image processors a family of models has, and how it is called.

Always those that compute with numpy and Pillow, by name: the others need torchvision, and where
that is installed its resampling would change tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Processor:
    """A class of transformers', and what its caller sets whatever a model's files say."""

    module: str  # below transformers.models
    name: str  # without its ending
    fixed: Mapping[str, Any] = field(default_factory=dict)


# By family; `model.image_families` says which families of models have which.
PROCESSORS: Final[Mapping[str, Processor]] = {
    "gemma3": Processor("gemma3", "Gemma3", {"do_pan_and_scan": False}),
    "gemma4": Processor("gemma4", "Gemma4"),
    "idefics2": Processor("idefics2", "Idefics2"),
    "idefics3": Processor("idefics3", "Idefics3"),
    "llava": Processor("llava", "Llava"),
    "llava_next": Processor("llava_next", "LlavaNext"),
    "pixtral": Processor("pixtral", "Pixtral"),
    "qwen2_vl": Processor("qwen2_vl", "Qwen2VL"),
    "siglip": Processor("siglip", "Siglip"),
    "smolvlm": Processor("smolvlm", "SmolVLM"),
}
# Rescaling and normalising are the shard's: until then pixels are bytes.
_LEFT_OUT: Final = {"do_rescale": False, "do_normalize": False}


class PixelProcessor:
    """Makes of an image what its model's tower reads."""

    def __init__(self, family: str, settings: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """`settings`: the model's own; `given`: what its processor hands on for each image.

        Raises ModelLoadError.
        """
        row = PROCESSORS.get(family)
        if row is None:
            known = ", ".join(PROCESSORS)
            raise ModelLoadError(f"no image processor is known of {family!r}, only of {known}")
        self._given = dict(given)
        self._process = _load(row, {**settings, **row.fixed, **_LEFT_OUT})

    def process(self, pixels: NDArray[np.uint8]) -> Arrays:
        """Return the arrays of one image, uint8 [height, width, 3]; raises ValueError."""
        found = self._process(
            [pixels], return_tensors="np", input_data_format="channels_last", **self._given
        )
        return {name: np.ascontiguousarray(value) for name, value in found.items()}


def _load(row: Processor, settings: Mapping[str, Any]) -> Any:
    name = f"transformers.models.{row.module}.image_processing_pil_{row.module}"
    try:
        module = importlib.import_module(name)
        return getattr(module, f"{row.name}ImageProcessorPil").from_dict(dict(settings))
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(
            f"the installed transformers has no {row.name}ImageProcessorPil: {error}"
        ) from error
    except (TypeError, ValueError) as error:
        raise ModelLoadError(
            f"the settings of the image processor cannot be used: {error}"
        ) from error
