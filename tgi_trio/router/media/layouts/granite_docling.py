"""Granite Docling: the tiles of a page behind their marks, row by row, then the whole page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.granite_docling import GraniteDoclingCanvas
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    ImageSize,
    PlainFinish,
    read_int,
)

_FAKE: Final = "<fake_token_around_image>"
_IMAGE: Final = "<image>"


@dataclass(frozen=True)
class GraniteDoclingLayout(PlainFinish):
    """As many features for each tile, and for the whole page where there are several tiles."""

    canvas: GraniteDoclingCanvas
    features: int  # of a tile
    placeholder: str = _IMAGE
    feature_token: str = _IMAGE

    def expand(self, size: ImageSize) -> str:
        tile = self.feature_token * self.features
        rows, columns = self.canvas.cut(*size)
        text = ""
        for row in range(1, rows + 1):
            marks = (f"{_FAKE}<row_{row}_col_{column}>" for column in range(1, columns + 1))
            text += "".join(mark + tile for mark in marks) + "\n"
        return text if rows * columns == 1 else f"{text}\n{_FAKE}<global-img>{tile}{_FAKE}"

    def count_features(self, size: ImageSize) -> int:
        tiles = self.canvas.cut(*size).tiles
        return int(self.features * (tiles + 1 if tiles > 1 else 1))


def lay_out_granite_docling(settings: ImageSettings) -> GraniteDoclingLayout:
    """Return the layout of a `granite_docling` model.

    Raises ModelLoadError, also where its pages are to have four times the features.
    """
    if settings.image_processor.get("fine_route"):
        raise ModelLoadError("fine_route is true, and served are pages of the coarse route alone")
    features = read_int(settings.processor, "image_seq_len", 64)
    return GraniteDoclingLayout(GraniteDoclingCanvas.read(settings.image_processor), features)
