"""DeepSeek-OCR: the tiles that an image is cut into, and the size of the whole.

For who counts its tokens, and for who makes its pixels. Sources: `transformers`' image processors
of DeepSeek-OCR 2 and Unlimited-OCR, and the code of DeepSeek-OCR, whose files say none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.canvases import (
    TileGrid,
    check_counts,
    check_tiles,
    fit_internvl,
    read_square,
)

_NO_TILES: Final = TileGrid(0, 0)


@dataclass(frozen=True, slots=True)
class DeepseekOcrCanvas:
    """What a model's files say of it; all sides in pixels."""

    side: int  # of the view of the whole image
    tile: int  # side of a tile
    least: int  # tiles of an image that is cut
    most: int

    @classmethod
    def read(cls, settings: Mapping[str, Any], tile: int, most: int) -> Self:
        """Return what the settings of an image processor say, with these for what they do not.

        Raises ModelLoadError.
        """
        side = read_square(settings, 1024)
        found = {
            "tile_size": settings.get("tile_size", tile),
            "min_patches": settings.get("min_patches", 2),
            "max_patches": settings.get("max_patches", most),
        }
        check_counts(found)
        if not settings.get("crop_to_patches", True):
            raise ModelLoadError("crop_to_patches is false: served is an image with its tiles")
        check_tiles(found["max_patches"])
        return cls(side, *found.values())

    def cut(self, height: int, width: int) -> TileGrid:
        """Return the grid of tiles of an image of this size; a small one has none."""
        if max(height, width) <= self.tile:
            return _NO_TILES
        return fit_internvl(height, width, self.tile, self.least, self.most)

    def shrink(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of an image in the view of the whole.

        Raises ValueError if nothing is left of it.
        """
        scale = self.side / max(height, width)
        shown = round(height * scale), round(width * scale)
        if not all(shown):
            raise ValueError("nothing is left of the image at this model's size")
        return shown


def read_deepseek_ocr(settings: Mapping[str, Any]) -> DeepseekOcrCanvas:
    """Return the canvas of DeepSeek-OCR and Unlimited-OCR; raises ModelLoadError.

    Of the former the files say nothing, and `model/deepseek_ocr.py` all.
    """
    return DeepseekOcrCanvas.read(settings, tile=640, most=32)


def read_deepseek_ocr2(settings: Mapping[str, Any]) -> DeepseekOcrCanvas:
    """Return the canvas of DeepSeek-OCR 2; raises ModelLoadError.

    How many tiles there are is its processor's own, whatever the files say.
    """
    fixed = {"crop_to_patches": True, "min_patches": 2, "max_patches": 6}
    return DeepseekOcrCanvas.read({**settings, **fixed}, tile=768, most=6)
