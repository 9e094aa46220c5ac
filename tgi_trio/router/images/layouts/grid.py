"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen 3.5: as many features as the image has merged patches."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Final

from tgi_trio.errors import ValidationError
from tgi_trio.router.images.layouts.layout import (
    ImageSettings,
    ImageSize,
    PlainFinish,
    read_int,
)

_STEEPEST: Final = 200  # the longer side over the shorter one, at most


@dataclass(frozen=True)
class GridLayout(PlainFinish):
    """The image at its own size, within bounds, in units of merged patches."""

    unit: int  # pixels, the side of a merged patch
    least: int  # pixels of the whole image
    most: int
    placeholder: str = "<|image_pad|>"
    feature_token: str = "<|image_pad|>"
    around = ("<|vision_start|>", "<|vision_end|>")

    def expand(self, size: ImageSize) -> str:
        return self.feature_token * self.count_features(size)

    def count_features(self, size: ImageSize) -> int:
        return self.count_units(size).pixels

    def count_units(self, size: ImageSize) -> ImageSize:
        """Return rows and columns of merged patches: transformers' `smart_resize`.

        Raises ValidationError for an image that is too long and narrow.
        """
        unit = self.unit
        steep = max(size) / min(size)
        if steep > _STEEPEST:
            raise ValidationError(
                f"invalid image: one side is {steep:.0f} times as long as the other, and this "
                f"model takes {_STEEPEST}"
            )
        rows, columns = round(size.height / unit), round(size.width / unit)
        if rows * columns * unit**2 > self.most:
            shrink = sqrt(size.pixels / self.most)
            rows = max(1, floor(size.height / shrink / unit))
            columns = max(1, floor(size.width / shrink / unit))
        elif rows * columns * unit**2 < self.least:
            grow = sqrt(self.least / size.pixels)
            rows = ceil(size.height * grow / unit)
            columns = ceil(size.width * grow / unit)
        return ImageSize(rows, columns)


def lay_out_qwen(settings: ImageSettings) -> GridLayout:
    """Return the layout of a Qwen-VL model; raises ModelLoadError."""
    found = settings.image_processor
    size = settings.size("size", {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
    patch, merge = read_int(found, "patch_size", 14), read_int(found, "merge_size", 2)
    return GridLayout(
        unit=patch * merge,
        least=read_int(found, "min_pixels", size.get("shortest_edge")),
        most=read_int(found, "max_pixels", size.get("longest_edge")),
    )
