"""A video's grids of patches, or frames, a few at a time: none attends to another in the tower.

So a video takes no more of the memory that a tower computes in than an image of a frame's size, and
what is measured at the start for the largest image (`largest.py`) holds; and others wait for a part
of it, not for all. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from tgi_trio.shard.media.features import Bundle, ImageFeatures

_PIXELS: Final = "pixel_values"
_GRID: Final = "image_grid_thw"
_FRAMES: Final = "num_frames"  # of a video whose frames are seen as images
# Patches of one pass where several grids are small: those of an image of 448 x 448 pixels.
_TOGETHER: Final = 1024
_PIXELS_TOGETHER: Final = 448 * 448  # of frames


def split_grids(bundle: Bundle) -> Iterator[Bundle]:
    """Yield parts of a video's bundle, each of some of its grids or frames; an image in one part.

    Raises ValueError where the grids do not make up its patches.
    """
    if _FRAMES in bundle:
        yield from _split_frames(bundle)
        return
    grid = bundle.get(_GRID)
    if grid is None or grid.shape != (1, 3) or grid[0, 0] <= 1:
        yield bundle
        return
    grids, rows, columns = grid[0].tolist()
    patches, pixels = rows * columns, bundle[_PIXELS]
    if len(pixels) != grids * patches:
        raise ValueError(
            f"a video of {grids} grids of {rows} x {columns} patches has {len(pixels)} of them"
        )
    several = max(1, _TOGETHER // patches)
    for first in range(0, grids, several):
        count = min(several, grids - first)
        own = pixels[first * patches : (first + count) * patches]
        # Each as an image of its own, which is what the towers of all families take.
        yield {**bundle, _PIXELS: own, _GRID: np.array([[1, rows, columns]] * count, grid.dtype)}


def _split_frames(bundle: Bundle) -> Iterator[Bundle]:
    pixels = bundle[_PIXELS]  # [..., frames, channels, height, width]
    count = pixels.shape[-4]
    several = max(1, _PIXELS_TOGETHER // (pixels.shape[-2] * pixels.shape[-1]))
    for first in range(0, count, several):
        yield {**bundle, _PIXELS: pixels[..., first : first + several, :, :, :]}


def join_features(parts: Sequence[ImageFeatures]) -> ImageFeatures:
    """Return the features of all parts, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    deep = {layer: np.concatenate([part.deep[layer] for part in parts]) for layer in parts[0].deep}
    return ImageFeatures(np.concatenate([part.rows for part in parts]), deep)
