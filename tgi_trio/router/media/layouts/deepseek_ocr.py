"""DeepSeek-OCR: the tiles of an image, the whole image, and a mark behind both, all as features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from tgi_trio.errors import ModelLoadError, ValidationError
from tgi_trio.media.canvases import TileGrid
from tgi_trio.media.deepseek_ocr import (
    DeepseekOcrCanvas,
    read_deepseek_ocr,
    read_deepseek_ocr2,
)
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    ImageSize,
    PlainFinish,
    read_int,
)

_IMAGE: Final = "<image>"
_QUERIES: Final = (12, 16)  # of DeepSeek-OCR 2, along a side of a tile and of the whole


@dataclass(frozen=True)
class DeepseekOcrLayout(PlainFinish):
    """DeepSeek-OCR 2: the features of each view one behind the other."""

    canvas: DeepseekOcrCanvas
    tile: int  # features along a side of a tile
    whole: int  # and of the view of the whole
    placeholder: str = _IMAGE
    feature_token: str = _IMAGE

    def expand(self, size: ImageSize) -> str:
        return self.feature_token * self.count_features(size)

    def count_features(self, size: ImageSize) -> int:
        try:
            self.canvas.shrink(*size)
        except ValueError as error:
            raise ValidationError(f"invalid image: {error}") from error
        return self._count_tiles(self.canvas.cut(*size)) + self._count_whole() + 1

    def _count_tiles(self, grid: TileGrid) -> int:
        return int(grid.tiles * self.tile**2)

    def _count_whole(self) -> int:
        return int(self.whole**2)


@dataclass(frozen=True)
class RowsLayout(DeepseekOcrLayout):
    """The first DeepSeek-OCR: rows across all tiles, and a mark behind each row."""

    def _count_tiles(self, grid: TileGrid) -> int:
        return grid.rows * self.tile * (grid.columns * self.tile + 1) if grid.tiles else 0

    def _count_whole(self) -> int:
        return self.whole * (self.whole + 1)


def lay_out_deepseek_ocr(settings: ImageSettings) -> RowsLayout:
    """Return the layout of DeepSeek-OCR. Raises ModelLoadError."""
    canvas = read_deepseek_ocr(settings.image_processor)
    return RowsLayout(canvas, *_count_sides(canvas, settings.processor))


def lay_out_deepseek_ocr2(settings: ImageSettings) -> DeepseekOcrLayout:
    """Return the layout of DeepSeek-OCR 2.

    Raises ModelLoadError, also for views that have others than its two numbers of queries.
    """
    canvas = read_deepseek_ocr2(settings.image_processor)
    sides = _count_sides(canvas, settings.processor)
    if sides != _QUERIES:
        raise ModelLoadError(
            f"its views have {sides[0]} and {sides[1]} features along a side, by tile_size, size, "
            f"patch_size and downsample_ratio; served are {_QUERIES[0]} and {_QUERIES[1]}"
        )
    return DeepseekOcrLayout(canvas, *sides)


def _count_sides(canvas: DeepseekOcrCanvas, processor: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many features there are along a side of a tile, and of the whole."""
    patch = read_int(processor, "patch_size", 16)
    ratio = read_int(processor, "downsample_ratio", 4)
    tile, whole = (ceil(side // patch / ratio) for side in (canvas.tile, canvas.side))
    return tile, whole
