"""LFM2-VL: an image's tiles with their positions before them, then the whole image."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.media.lfm2 import Lfm2Canvas
from tgi_trio.router.media.layouts.layout import ImageSettings, ImageSize, PlainFinish


@dataclass(frozen=True)
class Lfm2Layout(PlainFinish):
    """The features of each part, with marks unless the processor writes none."""

    canvas: Lfm2Canvas
    marks: bool = True
    placeholder: str = "<image>"
    feature_token: str = "<image>"

    def expand(self, size: ImageSize) -> str:
        grid, whole = self.canvas.cut(*size), self._count_whole(size)
        parts: list[tuple[str, int]] = []  # text before the features, and their number
        if grid.tiles == 1:
            parts.append(("", whole))
        else:
            for row in range(1, grid.rows + 1):
                for column in range(1, grid.columns + 1):
                    parts.append((f"<|img_row_{row}_col_{column}|>", self.canvas.units_of_tile))
            if self.canvas.shows_whole:
                parts.append(("<|img_thumbnail|>", whole))
        if not self.marks:
            return "".join(self.feature_token * count for _, count in parts)
        written = "".join(f"{mark}{self.feature_token * count}" for mark, count in parts)
        return f"<|image_start|>{written}<|image_end|>"

    def count_features(self, size: ImageSize) -> int:
        grid, whole = self.canvas.cut(*size), self._count_whole(size)
        if grid.tiles == 1:
            return whole
        return grid.tiles * self.canvas.units_of_tile + (whole if self.canvas.shows_whole else 0)

    def _count_whole(self, size: ImageSize) -> int:
        return self.canvas.count_units(*size).tiles


def lay_out_lfm2(settings: ImageSettings) -> Lfm2Layout:
    """Return the layout of an `lfm2_vl` model. Raises ModelLoadError."""
    canvas = Lfm2Canvas.read(settings.image_processor)
    return Lfm2Layout(canvas, bool(settings.processor.get("use_image_special_tokens", True)))
