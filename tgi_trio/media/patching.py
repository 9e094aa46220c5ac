"""Patches of the families whose image processors `transformers` has for torchvision alone.

An image is a grid of them as it comes. Made with Pillow instead: see `tiling.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.canvases import TileGrid, fit_gemma4, fit_muse
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
from tgi_trio.media.kimi_k25 import KimiCanvas
from tgi_trio.media.nemotron import NemotronCanvas


def tile_gemma4(settings: Mapping[str, Any]) -> Tiler:
    """Return what makes the patches [1, patches, N] of Gemma 4's unified model, uint8, row by row.

    N are the rows of a patch, pixel by pixel; `image_position_ids` [1, patches, 2] says in which
    column and row it is. `transformers` has room for as many as any image may have; here there are
    as many as the image has. Raises ModelLoadError.
    """
    names = {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280}
    patch, pooled, most = (settings.get(name, names[name]) for name in names)
    if not all(map(is_positive, (patch, pooled, most))):
        raise ModelLoadError(f"{', '.join(names)} must be positive numbers")
    unit, resample = patch * pooled, read_resample(settings, 3)

    def process(pixels: Pixels) -> Arrays:
        height, width, _ = pixels.shape
        grid = fit_gemma4(height, width, unit, most)
        picture = resize(pixels, grid.rows * unit, grid.columns * unit, resample)
        places = np.indices(grid).reshape(2, -1)[::-1].T
        return {
            "pixel_values": cut_patches(picture.transpose(2, 0, 1), unit)[None],
            "image_position_ids": places[None],
            "num_soft_tokens_per_image": np.array([grid.tiles]),
        }

    return process


def tile_kimi(settings: Mapping[str, Any]) -> Tiler:
    """Return what makes Kimi K2.5's patches [patches, 3, side, side], uint8, row by row.

    The image is at the upper left with nothing around. `image_grid_thw` [1, 3] says how many rows
    and columns of patches there are. Raises ModelLoadError.
    """
    canvas, resample = KimiCanvas.read(settings), read_resample(settings, 3)

    def process(pixels: Pixels) -> Arrays:
        height, width, channels = pixels.shape
        units, (high, wide) = canvas.count_units(height, width), canvas.shrink(height, width)
        grid = TileGrid(units.rows * canvas.merge, units.columns * canvas.merge)
        size = grid.rows * canvas.patch, grid.columns * canvas.patch
        picture = np.zeros((*size, channels), np.uint8)
        picture[:high, :wide] = resize(pixels, high, wide, resample)
        return {"pixel_values": split_grid(picture, grid), "image_grid_thw": np.array([[1, *grid]])}

    return process


def tile_nemotron(settings: Mapping[str, Any]) -> Tiler:
    """Return what makes Nemotron 3 Nano Omni's patches [patches, 3 * side * side], uint8, by row.

    The image fills them all. `image_grid_hw` [1, 2] says how many rows and columns of patches there
    are. Raises ModelLoadError.
    """
    canvas, resample = NemotronCanvas.read(settings), read_resample(settings, 3)

    def process(pixels: Pixels) -> Arrays:
        grid = canvas.fit(*pixels.shape[:2])
        size = grid.rows * canvas.patch, grid.columns * canvas.patch
        parts = split_grid(resize(pixels, *size, resample), grid)
        return {"pixel_values": parts.reshape(grid.tiles, -1), "image_grid_hw": np.array([grid])}

    return process


def tile_muse(settings: Mapping[str, Any]) -> Tiler:
    """Return what makes Muse Glimmer's patches [patches, frames * 3 * N], uint8, row by row.

    N are the pixels of a channel of a patch; all frames are the same. `image_grid_thw` [1, 3] says
    how many rows and columns of patches there are. Raises ModelLoadError.
    """
    names = {"patch_size": 14, "merge_size": 2, "max_image_tokens": 4096, "temporal_patch_size": 2}
    patch, merge, most, frames = (settings.get(name, names[name]) for name in names)
    if not all(map(is_positive, (patch, merge, most, frames))):
        raise ModelLoadError(f"{', '.join(names)} must be positive numbers")
    resample = read_resample(settings, 1)

    def process(pixels: Pixels) -> Arrays:
        height, width, channels = pixels.shape
        grid = fit_muse(height, width, patch * merge, most)
        rows, columns = grid.rows * merge, grid.columns * merge
        picture = resize(pixels, rows * patch, columns * patch, resample)
        parts = picture.reshape(rows, patch, columns, patch, channels).transpose(0, 2, 4, 1, 3)
        found = np.repeat(parts.reshape(rows * columns, 1, -1), frames, axis=1)
        shape = np.array([[1, rows, columns]])
        return {"pixel_values": found.reshape(rows * columns, -1), "image_grid_thw": shape}

    return process
