"""LLaVA-NeXT: the whole image, then the grid of crops that fits it best, without padding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.router.images.layouts.fixed import extra_features, patch_size
from tgi_trio.router.images.layouts.layout import (
    ImageSettings,
    ImageSize,
    PlainFinish,
    read_int,
)

_PINPOINTS: Final = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True)
class PinpointLayout(PlainFinish):
    """Features of one crop, of the image's part of the grid, and one for each row of that."""

    pinpoints: tuple[ImageSize, ...]  # sizes of grids of crops, in pixels
    crop: int  # pixels, the side of a crop
    patch: int  # pixels
    extra: int  # features of the whole image besides its patches
    placeholder: str = "<image>"
    feature_token: str = "<image>"

    def expand(self, size: ImageSize) -> str:
        return self.feature_token * self.count_features(size)

    def count_features(self, size: ImageSize) -> int:
        best = find_pinpoint(size, self.pinpoints)
        side = self.crop // self.patch
        shown = unpad(size, side * (best.height // self.crop), side * (best.width // self.crop))
        return side * side + shown.pixels + shown.height + self.extra


def find_pinpoint(size: ImageSize, pinpoints: Iterable[ImageSize]) -> ImageSize:
    """Return the size that keeps most of an image's pixels, and among equals wastes least.

    Ties go to the first in the configuration: transformers' `select_best_resolution`.
    """

    def worth(each: ImageSize) -> tuple[int, int]:
        scale = min(each.width / size.width, each.height / size.height)
        kept = min(int(size.width * scale) * int(size.height * scale), size.pixels)
        return kept, -(each.pixels - kept)

    return max(pinpoints, key=worth)


def unpad(size: ImageSize, rows: int, columns: int) -> ImageSize:
    """Return how many rows and columns of a grid of features show the image, not padding."""
    if size.width / size.height > columns / rows:
        shown = int(round(size.height * (columns / size.width), 7))
        return ImageSize(rows - (rows - shown) // 2 * 2, columns)
    shown = int(round(size.width * (rows / size.height), 7))
    return ImageSize(rows, columns - (columns - shown) // 2 * 2)


def lay_out_llava_next(settings: ImageSettings) -> PinpointLayout:
    """Return the layout of a `llava_next` model. Raises ModelLoadError."""
    listed = settings.image_processor.get("image_grid_pinpoints") or _PINPOINTS
    try:
        pinpoints = tuple(ImageSize(int(height), int(width)) for height, width in listed)
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"image_grid_pinpoints must be pairs of numbers: {error}") from error
    size = settings.size("size", {"shortest_edge": 224})
    edge = size.get("shortest_edge")
    crop = read_int({"size": edge or min(size.get("height", 0), size.get("width", 0))}, "size")
    return PinpointLayout(pinpoints, crop, patch_size(settings), extra_features(settings))
