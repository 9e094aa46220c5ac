"""What a model's folder says about images: whether it takes any, and how."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError, ValidationError
from tgi_trio.model.config import read_json, read_values
from tgi_trio.model.image_families import find_family, sees
from tgi_trio.router.images.decoder import DecoderSettings
from tgi_trio.router.images.layouts.layout import ImageLayout, ImageSettings, ImageSize
from tgi_trio.router.images.layouts.table import LAYOUTS

_SHAPES: Final = (1.0, 4 / 3, 3 / 4, 2.0, 1 / 2)  # width over height
_STEP: Final = 16  # each try has 1 / 16 fewer pixels than the one before
# Keys of an image processor's settings that do not affect pixels.
_NAMES: Final = ("image_processor_type", "processor_class", "feature_extractor_type", "auto_map")


@dataclass(frozen=True, slots=True)
class ImageModel:
    """How one model takes images."""

    family: str  # a key of `images.processors.PROCESSORS`
    layout: ImageLayout
    processor: Mapping[str, Any]  # settings of its image processor
    needs: tuple[str, ...] = ()  # as in `ImageFamily`

    def decoder_settings(self, max_pixels: int) -> DecoderSettings:
        """Return how its images are decoded."""
        options = self.layout.processor_options
        return DecoderSettings(self.family, self.processor, options, max_pixels)

    def describe_largest(self, max_pixels: int, max_tokens: int) -> str:
        """Return the largest allowed image and its decoder settings, as JSON; "": none allowed."""
        size = find_largest(self.layout, max_pixels, max_tokens)
        if size is None:
            return ""
        made = json.loads(self.decoder_settings(max_pixels).dump())
        return json.dumps(made | {"height": size.height, "width": size.width})


def find_largest(layout: ImageLayout, max_pixels: int, max_tokens: int) -> ImageSize | None:
    """Return the size of an image with about as many tokens as any; None if none is allowed.

    An image becomes a grid of tiles or patches by its shape, so common shapes are tried.
    """
    best, most = None, 0
    for shape in _SHAPES:
        pixels = max_pixels
        while pixels > 0:
            height = max(1, math.isqrt(int(pixels / shape)))
            size = ImageSize(height, max(1, pixels // height))
            try:
                tokens = layout.count_features(size)
            except ValidationError:
                break
            if tokens <= max_tokens:
                best, most = (size, tokens) if tokens > most else (best, most)
                break
            pixels -= max(1, pixels // _STEP)
    return best


def read_image_settings(folder: Path) -> ImageSettings:
    """Return the image settings in a folder's files. Raises ModelLoadError."""
    processor = read_json(folder / "processor_config.json") or {}
    image_processor = read_json(folder / "preprocessor_config.json")
    if image_processor is None:
        found = processor.get("image_processor")
        image_processor = found if isinstance(found, dict) else {}
    return ImageSettings(read_values(folder) or {}, image_processor, processor)


def find_image_model(folder: Path) -> ImageModel | None:
    """Return how the model in a folder takes images, None if it takes none.

    Raises ModelLoadError if its images are not served, or its settings cannot be used.
    """
    settings = read_image_settings(folder)
    if not sees(settings.config):
        return None
    family = find_family(settings.config)
    layout = LAYOUTS[family.layout](settings)
    if not settings.image_processor:
        raise ModelLoadError(
            f"{folder} has no preprocessor_config.json, which says how images are processed"
        )
    kept = {name: value for name, value in settings.image_processor.items() if name not in _NAMES}
    return ImageModel(family.processor, layout, kept, family.needs)
