"""Tiles of the families whose image processors `transformers` has for torchvision alone.

Made with Pillow instead. Its resampling rounds otherwise than torchvision's: by one of 255 in some
values where it is bilinear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor
from typing import Any, Final, Self

import numpy as np

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.canvases import (
    ONE_TILE,
    fit_cohere2,
    fit_llama4,
    fit_perception,
)
from tgi_trio.media.cutting import (
    Arrays,
    Pixels,
    Tiler,
    cut_patches,
    is_positive,
    read_resample,
    resize,
    split_grid,
)
from tgi_trio.media.deepseek_ocr import (
    DeepseekOcrCanvas,
    read_deepseek_ocr,
    read_deepseek_ocr2,
)
from tgi_trio.media.lfm2 import Lfm2Canvas
from tgi_trio.media.phi4 import PATCHES, SIDE, Phi4Canvas
from tgi_trio.media.step3p7 import Step3p7Canvas

_BILINEAR: Final = 2
_GREY: Final = (127, 127, 127)


@dataclass(frozen=True, slots=True)
class TileSettings:
    """What a model's files say of its tiles."""

    side: int  # pixels
    most: int  # tiles, without the one of the whole image
    resample: int

    @classmethod
    def read(cls, settings: Mapping[str, Any], side: int, most: int, resample: int) -> Self:
        """Return them, with these for what is not said; raises ModelLoadError."""
        size = settings.get("size") or {"height": side, "width": side}
        shape = size if isinstance(size, Mapping) else {}
        high, wide = shape.get("height"), shape.get("width")
        most = settings.get("max_patches", most)
        if not isinstance(high, int) or high != wide or not is_positive(high):
            raise ModelLoadError(f"tiles need one height and width, and size is {size!r}")
        if not is_positive(most):
            raise ModelLoadError(f"max_patches must be a positive number, not {most!r}")
        return cls(high, most, read_resample(settings, resample))


def tile_llama4(settings: Mapping[str, Any]) -> Tiler:
    """Return what makes Llama 4's tiles [tiles, 3, side, side], uint8; raises ModelLoadError.

    The image keeps its proportions, at the upper left of its grid with nothing around. Where that
    has several tiles the whole image follows, as one that does not.
    """
    tiles = TileSettings.read(settings, side=336, most=16, resample=2)
    largest = bool(settings.get("resize_to_max_canvas", False))

    def process(pixels: Pixels) -> Arrays:
        height, width, _ = pixels.shape
        grid = fit_llama4(height, width, tiles.side, tiles.most, largest)
        canvas = np.zeros((grid.rows * tiles.side, grid.columns * tiles.side, 3), np.uint8)
        shown = _show_llama4((height, width), canvas.shape[:2], None if largest else tiles.side)
        canvas[: shown[0], : shown[1]] = resize(pixels, *shown, tiles.resample)
        return {"pixel_values": _with_whole(split_grid(canvas, grid), pixels, tiles)}

    return process


def tile_cohere2(settings: Mapping[str, Any]) -> Tiler:
    """Return what makes Command A Vision's tiles, likewise: the image fills its whole grid."""
    tiles = TileSettings.read(settings, side=512, most=12, resample=3)
    cuts = bool(settings.get("crop_to_patches", True))

    def process(pixels: Pixels) -> Arrays:
        height, width, _ = pixels.shape
        grid = fit_cohere2(height, width, tiles.side, tiles.most) if cuts else ONE_TILE
        size = grid.rows * tiles.side, grid.columns * tiles.side
        parts = split_grid(resize(pixels, *size, tiles.resample), grid)
        return {"pixel_values": _with_whole(parts, pixels, tiles)}

    return process


def tile_perception(settings: Mapping[str, Any]) -> Tiler:
    """Return what makes Perception LM's views [1, views, 3, side, side], uint8: of the whole, and
    the tiles of a grid that the image fills, row by row. Raises ModelLoadError.
    """
    names = {"tile_size": 448, "max_num_tiles": 36}
    side, most = (settings.get(name, names[name]) for name in names)
    if not all(map(is_positive, (side, most))):
        raise ModelLoadError(f"{', '.join(names)} must be positive numbers")
    tiles = TileSettings(side, most, read_resample(settings, 3))
    cuts = settings.get("vision_input_type", "thumb+tile") == "thumb+tile"

    def process(pixels: Pixels) -> Arrays:
        height, width, _ = pixels.shape
        whole = resize(pixels, side, side, tiles.resample).transpose(2, 0, 1)[None]
        if not cuts:
            return {"pixel_values": np.ascontiguousarray(whole)[None]}
        grid = fit_perception(height, width, side, most)
        size = grid.rows * side, grid.columns * side
        parts = split_grid(resize(pixels, *size, tiles.resample), grid)
        return {"pixel_values": np.concatenate((whole, parts))[None]}

    return process


def tile_lfm2(settings: Mapping[str, Any]) -> Tiler:
    """Return what makes LFM2-VL's patches [parts, patches, N], uint8; raises ModelLoadError.

    Parts are the tiles of a large image and then the whole of it. N are the rows of a patch, pixel
    by pixel; `spatial_shapes` [parts, 2] says how many rows and columns of patches a part has, and
    `pixel_attention_mask` [parts, patches] which patches there are. `transformers` has room for as
    many as any image may have; here there are as many as the largest part has.
    """
    canvas, resample = Lfm2Canvas.read(settings), read_resample(settings, 2)

    def process(pixels: Pixels) -> Arrays:
        height, width, _ = pixels.shape
        grid, whole = canvas.cut(height, width), canvas.count_units(height, width)
        parts: list[Pixels] = []
        if grid.tiles > 1:
            size = grid.rows * canvas.tile, grid.columns * canvas.tile
            parts.extend(split_grid(resize(pixels, *size, resample), grid))
        if grid.tiles == 1 or canvas.shows_whole:
            size = whole.rows * canvas.unit, whole.columns * canvas.unit
            parts.append(resize(pixels, *size, resample).transpose(2, 0, 1))
        patches = [cut_patches(part, canvas.patch) for part in parts]
        longest = max(map(len, patches))
        found = np.zeros((len(parts), longest, 3 * canvas.patch**2), np.uint8)
        for part, own in zip(found, patches, strict=True):
            part[: len(own)] = own
        counts = np.array([len(own) for own in patches])
        return {
            "pixel_values": found,
            "pixel_attention_mask": (np.arange(longest) < counts[:, None]).astype(np.uint8),
            "spatial_shapes": np.array([part.shape[1:] for part in parts]) // canvas.patch,
        }

    return process


def tile_step3p7(settings: Mapping[str, Any]) -> Tiler:
    """Return what makes Step 3.7's views: of the whole [1, 3, side, side], and of windows in
    `pixel_values_local` [windows, 3, side, side], row by row, if there are any; uint8.

    `num_local_patches` [1] says how many there are. Raises ModelLoadError.
    """
    canvas, resample = Step3p7Canvas.read(settings), read_resample(settings, 2)

    def process(pixels: Pixels) -> Arrays:
        height, width, channels = pixels.shape
        cut = canvas.cut(height, width)
        if cut.square:
            filled = np.zeros((cut.square, cut.square, channels), np.uint8)
            filled[:height, :width] = pixels
            pixels = filled
        whole = resize(resize(pixels, *cut.whole, resample), canvas.side, canvas.side, resample)
        arrays = {
            "pixel_values": whole.transpose(2, 0, 1)[None],
            "num_local_patches": np.array([cut.grid.tiles]),
        }
        if cut.grid.tiles:
            cropped = resize(pixels, *cut.cropped, resample)
            windows = (
                cropped[top : top + cut.window, left : left + cut.window]
                for top in range(0, cut.cropped[0], cut.window)
                for left in range(0, cut.cropped[1], cut.window)
            )
            views = (resize(each, canvas.window, canvas.window, resample) for each in windows)
            arrays["pixel_values_local"] = np.stack(list(views)).transpose(0, 3, 1, 2)
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    return process


def tile_phi4(settings: Mapping[str, Any]) -> Tiler:
    """Return what makes Phi-4-multimodal's crops [crops, 3, side, side], uint8, row by row.

    `image_sizes` [1, 2] says how large they are together, and `pixel_attention_mask`
    [crops, patches, patches] which patches the image reaches into. The view of the whole is made of
    these by whoever normalises them. Raises ModelLoadError.
    """
    canvas = Phi4Canvas.read(settings)

    def process(pixels: Pixels) -> Arrays:
        cut = canvas.cut(*pixels.shape[:2])
        rows, columns = cut.grid
        picture = np.full((rows * SIDE, columns * SIDE, 3), 255, np.uint8)
        picture[: cut.height, : cut.width] = resize(pixels, cut.height, cut.width, _BILINEAR)
        seen = np.zeros((rows * PATCHES, columns * PATCHES, 1), np.uint8)
        seen[: cut.seen[0], : cut.seen[1]] = 1
        return {
            "pixel_values": split_grid(picture, cut.grid),
            "pixel_attention_mask": split_grid(seen, cut.grid)[:, 0],
            "image_sizes": np.array([picture.shape[:2]]),
        }

    return process


def tile_deepseek_ocr(settings: Mapping[str, Any]) -> Tiler:
    """Return what makes DeepSeek-OCR's views: of the whole [1, 3, side, side], in the middle of
    grey, and of tiles in `pixel_values_local` [tiles, 3, side, side], row by row, if there are any;
    uint8.

    `num_local_patches` [1] says how many there are, and `grids` [1, 2] in how many rows and
    columns. Raises ModelLoadError.
    """
    return _tile_beside_whole(settings, read_deepseek_ocr(settings))


def tile_deepseek_ocr2(settings: Mapping[str, Any]) -> Tiler:
    """Return what makes DeepSeek-OCR 2's views, likewise."""
    return _tile_beside_whole(settings, read_deepseek_ocr2(settings))


def _tile_beside_whole(settings: Mapping[str, Any], canvas: DeepseekOcrCanvas) -> Tiler:
    resample, ground = read_resample(settings, 3), settings.get("background_color", _GREY)
    if np.shape(ground) != (3,) or not all(value in range(256) for value in ground):
        raise ModelLoadError(f"background_color must be three bytes, not {ground!r}")

    def process(pixels: Pixels) -> Arrays:
        height, width = pixels.shape[:2]
        high, wide = canvas.shrink(height, width)
        top, left = (canvas.side - high) // 2, (canvas.side - wide) // 2
        whole = np.empty((canvas.side, canvas.side, 3), np.uint8)
        whole[:] = ground
        whole[top : top + high, left : left + wide] = resize(pixels, high, wide, resample)
        grid = canvas.cut(height, width)
        arrays = {
            "pixel_values": np.ascontiguousarray(whole.transpose(2, 0, 1))[None],
            "num_local_patches": np.array([grid.tiles]),
            "grids": np.array([grid]),
        }
        if grid.tiles:
            size = grid.rows * canvas.tile, grid.columns * canvas.tile
            arrays["pixel_values_local"] = split_grid(resize(pixels, *size, resample), grid)
        return arrays

    return process


def _show_llama4(size: tuple[int, int], room: tuple[int, int], tile: int | None) -> tuple[int, int]:
    """Return what an image of `size` is resized to within the room of its grid: at least a pixel.

    It grows to a tile's side at most, or without limit where that is None. `transformers` has a
    side that the grid bounds as a tensor, and so its scale as float32: at ties that is a pixel.
    """
    sides: list[int] = []
    scales: list[np.floating] = []
    for now, bound in zip(size, room, strict=True):
        wanted = bound if tile is None else max(now, tile)
        sides.append(min(wanted, bound))
        kind = np.float32 if tile is None or bound < wanted else np.float64
        scales.append(kind(sides[-1]) / kind(now))
    (height, width), (high, wide) = size, scales
    if np.float32(wide) < np.float32(high) if np.float32 in map(type, scales) else wide < high:
        return max(min(floor(type(wide)(height) * wide), sides[0]), 1), sides[1]
    return sides[0], max(min(floor(type(high)(width) * high), sides[1]), 1)


def _with_whole(parts: Pixels, pixels: Pixels, tiles: TileSettings) -> Pixels:
    """Return tiles and, behind several, the whole image as one."""
    if len(parts) == 1:
        return parts
    whole = resize(pixels, tiles.side, tiles.side, tiles.resample)
    return np.concatenate((parts, whole.transpose(2, 0, 1)[None]))
