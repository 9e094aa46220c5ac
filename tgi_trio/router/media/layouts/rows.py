"""Pixtral and Mistral 3: rows of features, each ended by a token; LightOn OCR: without those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor
from typing import Any

from tgi_trio.errors import ValidationError
from tgi_trio.router.media.layouts.fixed import patch_size
from tgi_trio.router.media.layouts.layout import (
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
        """Return rows and columns of features. Raises ValidationError if a side vanishes."""
        ratio = max(size.height / self.longest, size.width / self.longest)
        if ratio > 1:
            size = ImageSize(floor(size.height / ratio), floor(size.width / ratio))
        if not size.pixels:
            raise ValidationError(
                f"invalid image: nothing is left of its shorter side when the longer one is scaled "
                f"to {self.longest} pixels"
            )
        return ImageSize((size.height - 1) // self.unit + 1, (size.width - 1) // self.unit + 1)


@dataclass(frozen=True)
class PlainRowLayout(RowLayout):
    """Feature tokens only; less than a merged patch at an edge is dropped."""

    merged: int = 28  # pixels, the side of a merged patch; `unit` is for resizing
    placeholder: str = "<|image_pad|>"
    feature_token: str = "<|image_pad|>"

    @property
    def processor_options(self) -> Mapping[str, Any]:
        return {}

    def expand(self, size: ImageSize) -> str:
        return self.feature_token * self.count_features(size)

    def count_units(self, size: ImageSize) -> ImageSize:
        rows, columns = (
            side * self.unit // self.merged for side in RowLayout.count_units(self, size)
        )
        if not rows * columns:
            raise ValidationError(
                f"invalid image: it is smaller than {self.merged} pixels, of which this model "
                "makes a token"
            )
        return ImageSize(rows, columns)


def lay_out_pixtral(settings: ImageSettings) -> RowLayout:
    """Return the layout of a `pixtral` or `mistral3` model. Raises ModelLoadError."""
    merge = settings.config.get("spatial_merge_size") or 1
    merge = read_int(settings.processor, "spatial_merge_size", merge)
    longest = read_int(settings.size("size", {}), "longest_edge", 1024)
    return RowLayout(patch_size(settings) * merge, longest)


def lay_out_lighton(settings: ImageSettings) -> PlainRowLayout:
    """Return the layout of a `lighton_ocr` model. Raises ModelLoadError."""
    found = settings.image_processor.get("patch_size", 16)
    side = found.get("height") if isinstance(found, Mapping) else found
    merge = read_int(settings.processor, "spatial_merge_size", 2)
    return PlainRowLayout(
        unit=read_int({"patch_size": side}, "patch_size"),
        longest=read_int(settings.size("size", {}), "longest_edge", 1024),
        merged=read_int(settings.processor, "patch_size", 14) * merge,
    )
