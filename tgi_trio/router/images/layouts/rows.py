"""Pixtral and Mistral 3: rows of features, each with a token that ends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor
from typing import Any

from tgi_trio.errors import ValidationError
from tgi_trio.router.images.layouts.fixed import patch_size
from tgi_trio.router.images.layouts.layout import (
    ImageSettings,
    ImageSize,
    PlainFinish,
    read_int,
)


@dataclass(frozen=True)
class RowLayout(PlainFinish):
    """The image scaled down to a longest side, in units of merged patches."""

    unit: int  # pixels, the side of a merged patch
    longest: int  # pixels
    placeholder: str = "[IMG]"
    feature_token: str = "[IMG]"

    @property
    def processor_options(self) -> Mapping[str, Any]:
        return {"patch_size": self.unit}

    def expand(self, size: ImageSize) -> str:
        rows, columns = self.count_units(size)
        row = self.feature_token * columns
        return f"{row}[IMG_BREAK]" * (rows - 1) + f"{row}[IMG_END]"

    def count_features(self, size: ImageSize) -> int:
        return self.count_units(size).pixels

    def count_units(self, size: ImageSize) -> ImageSize:
        """Return rows and columns of features; raises ValidationError where one vanishes."""
        ratio = max(size.height / self.longest, size.width / self.longest)
        if ratio > 1:
            size = ImageSize(floor(size.height / ratio), floor(size.width / ratio))
        if not size.pixels:
            raise ValidationError(
                f"invalid image: nothing is left of its shorter side when the longer one is scaled "
                f"to {self.longest} pixels"
            )
        return ImageSize((size.height - 1) // self.unit + 1, (size.width - 1) // self.unit + 1)


def lay_out_pixtral(settings: ImageSettings) -> RowLayout:
    """Return the layout of a `pixtral` or `mistral3` model; raises ModelLoadError."""
    merge = settings.config.get("spatial_merge_size") or 1
    merge = read_int(settings.processor, "spatial_merge_size", merge)
    longest = read_int(settings.size("size", {}), "longest_edge", 1024)
    return RowLayout(patch_size(settings) * merge, longest)
