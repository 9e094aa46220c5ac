"""Cutting pictures of bytes into tiles and patches, and resampling them with Pillow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.canvases import TileGrid

Arrays = dict[str, NDArray[Any]]
Pixels = NDArray[np.uint8]  # [height, width, 3]
Tiler = Callable[[Pixels], Arrays]

_RESAMPLINGS: Final = range(6)  # Pillow's numbers


def is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_resample(settings: Mapping[str, Any], default: int) -> int:
    found: Any = settings.get("resample", default)
    if found not in _RESAMPLINGS:
        raise ModelLoadError(f"resample must be a number of Pillow's, not {found!r}")
    return int(found)


def cut_patches(picture: Pixels, side: int) -> Pixels:
    """Return a picture's patches [patches, side * side * 3], row by row, of one [3, high, wide]."""
    channels, height, width = picture.shape
    parts = picture.reshape(channels, height // side, side, width // side, side)
    return parts.transpose(1, 3, 2, 4, 0).reshape(-1, side * side * channels)


def split_grid(canvas: Pixels, grid: TileGrid) -> Pixels:
    """Return a picture's tiles [tiles, 3, side, side], row by row."""
    height, width, channels = canvas.shape
    high, wide = height // grid.rows, width // grid.columns
    parts = canvas.reshape(grid.rows, high, grid.columns, wide, channels)
    return np.ascontiguousarray(parts.transpose(0, 2, 4, 1, 3)).reshape(-1, channels, high, wide)


def resize(pixels: Pixels, height: int, width: int, resample: int) -> Pixels:
    from PIL import Image

    if pixels.shape[:2] == (height, width):
        return pixels
    how = Image.Resampling(resample)
    return np.asarray(Image.fromarray(pixels).resize((width, height), how))
