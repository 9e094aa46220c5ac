"""Llama 4, InternVL, Qianfan-OCR, Aya Vision, Command A Vision, Perception LM: tiles and the whole
image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from tgi_trio.media.canvases import (
    ONE_TILE,
    TileGrid,
    fit_cohere2,
    fit_internvl,
    fit_llama4,
    fit_perception,
)
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    ImageSize,
    PlainFinish,
    read_int,
)

_PATCH: Final = "<|IMG_PATCH|>"  # Cohere's


@dataclass(frozen=True)
class CanvasLayout(PlainFinish):
    """The same text for each tile, and for the whole image where there are several."""

    count_grid: Callable[[ImageSize], TileGrid]
    features: int  # of one tile, and of the whole image
    placeholder: str
    feature_token: str
    begin: str = ""
    end: str = ""
    behind_tile: str = ""
    always_whole: bool = False  # the whole image is beside a single tile as well
    placeholder_is_text: bool = False

    def expand(self, size: ImageSize) -> str:
        tile = self.feature_token * self.features + self.behind_tile
        return self.begin + tile * self.count_tiles(size) + self.end

    def count_features(self, size: ImageSize) -> int:
        return self.features * self.count_tiles(size)

    def count_tiles(self, size: ImageSize) -> int:
        """Return the number of tiles for the tower, including the whole image."""
        tiles = self.count_grid(size).tiles
        return tiles + 1 if tiles > 1 or self.always_whole else 1


@dataclass(frozen=True)
class Llama4Layout(CanvasLayout):
    """Marks between tiles and after each row."""

    def expand(self, size: ImageSize) -> str:
        tile = self.feature_token * self.features
        rows, columns = self.count_grid(size)
        row = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
        tiles = row * rows if rows * columns > 1 else ""
        return f"<|image_start|>{tiles}<|image|>{tile}<|image_end|>"


@dataclass(frozen=True)
class AyaLayout(CanvasLayout):
    """Numbered tiles."""

    def expand(self, size: ImageSize) -> str:
        tile = self.feature_token * self.features
        tiles = (f"TILE_{i}{tile}" for i in range(1, self.count_tiles(size)))
        return f"{self.begin}{''.join(tiles)}TILE_GLOBAL{tile}{self.end}"


def lay_out_llama4(settings: ImageSettings) -> Llama4Layout:
    """Return the layout of a `llama4` model. Raises ModelLoadError."""
    side, found = _tile_side(settings, 336), settings.image_processor
    ratio = settings.processor.get("pixel_shuffle_ratio", 0.5)
    most, largest = read_int(found, "max_patches", 16), bool(found.get("resize_to_max_canvas"))
    patches = (side // read_int(settings.processor, "patch_size", 14)) ** 2
    return Llama4Layout(
        lambda size: fit_llama4(*size, side, most, largest),
        features=patches // round(1 / ratio**2),
        placeholder="<|image|>",
        feature_token="<|patch|>",
    )


def lay_out_internvl(settings: ImageSettings) -> CanvasLayout:
    """Return the layout of an `internvl` model. Raises ModelLoadError."""
    return CanvasLayout(
        _internvl_grid(settings),
        features=read_int(settings.processor, "image_seq_length", 256),
        placeholder="<IMG_CONTEXT>",
        feature_token="<IMG_CONTEXT>",
        begin="<img>",
        end="</img>",
    )


def lay_out_qianfan(settings: ImageSettings) -> CanvasLayout:
    """Return the layout of a `qianfan_ocr` model: InternVL's, by another placeholder."""
    return replace(lay_out_internvl(settings), placeholder="<image>", placeholder_is_text=True)


def lay_out_aya(settings: ImageSettings) -> AyaLayout:
    """Return the layout of an `aya_vision` model. Raises ModelLoadError."""
    found = settings.processor
    patch = read_int(found, "patch_size", 28) * read_int(found, "downsample_factor", 1)
    return AyaLayout(
        _internvl_grid(settings),
        features=(read_int(found, "img_size", 364) // patch) ** 2,
        placeholder="<image>",
        feature_token=_PATCH,
        begin="<|START_OF_IMG|>",
        end="<|END_OF_IMG|>",
    )


def lay_out_cohere2(settings: ImageSettings) -> CanvasLayout:
    """Return the layout of a `cohere2_vision` model. Raises ModelLoadError."""
    side, found = _tile_side(settings, 512), settings.image_processor
    most = read_int(found, "max_patches", 12)
    cuts = bool(found.get("crop_to_patches", True))
    return CanvasLayout(
        lambda size: fit_cohere2(*size, side, most) if cuts else ONE_TILE,
        features=read_int(found, "patch_size", 16) ** 2,
        placeholder=_PATCH,
        feature_token=_PATCH,
        begin="<|START_OF_IMG|>",
        end="<|END_OF_IMG|>",
        behind_tile="<|IMG_LINE_BREAK|>",
    )


def lay_out_perception_lm(settings: ImageSettings) -> CanvasLayout:
    """Return the layout of a `perception_lm` model. Raises ModelLoadError."""
    found = settings.image_processor
    side, most = read_int(found, "tile_size", 448), read_int(found, "max_num_tiles", 36)
    cuts = found.get("vision_input_type", "thumb+tile") == "thumb+tile"
    patch = read_int(settings.processor, "patch_size")
    return CanvasLayout(
        lambda size: fit_perception(*size, side, most) if cuts else ONE_TILE,
        features=(side // patch // read_int(settings.processor, "pooling_ratio", 2)) ** 2,
        placeholder="<|image|>",
        feature_token="<|image|>",
        always_whole=cuts,
    )


def _internvl_grid(settings: ImageSettings) -> Callable[[ImageSize], TileGrid]:
    """Return the grid of an image; tiles are always cut, whatever the files say."""
    side, found = _tile_side(settings, 384), settings.image_processor
    least, most = read_int(found, "min_patches", 1), read_int(found, "max_patches", 12)
    return lambda size: fit_internvl(*size, side, least, most) if most > 1 else ONE_TILE


def _tile_side(settings: ImageSettings, default: int) -> int:
    return read_int(settings.size("size", {}), "height", default)
