"""Rotary positions of images that are numbered, with a mark behind each row (Hunyuan VL).

The tokens of an image are a mark, its features row by row with a mark behind each row, and a mark.
Those between the first and the last turn by their columns and rows, and by how many images are
before theirs; the first parts of their positions, and all parts of other tokens', are places in the
prompt. So text behind an image does not lag, unlike that of Qwen's families.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tgi_trio.ipc.images import SequenceImage
from tgi_trio.shard.media.prompt_geometry import BundleGrid, Ints


def turn_by_numbers(
    images: Sequence[SequenceImage], grids: Sequence[BundleGrid], parts: int
) -> Ints:
    """Return positions [parts, N] of a prompt's tokens, up to the last of its last image.

    The last three parts are column, row and number. They are what transformers' `get_rope_index`
    returns. Raises ValueError for an image whose tokens are not those of its grid.
    """
    end = images[-1].end if images else 0
    turns: Ints = np.tile(np.arange(end), (parts, 1))
    for number, (image, grid) in enumerate(zip(images, grids, strict=True)):
        columns = grid.columns + 1
        count = grid.grids * grid.rows * columns
        tokens = [size for _, size in image.runs]
        if grid.grids != 1 or tokens != [count + 2]:
            raise ValueError(
                f"an image of {grid.rows} x {grid.columns} features and their marks has runs of "
                f"{tokens} tokens for them, not of {count + 2}"
            )
        first = image.first + image.runs[0][0] + 1
        row, column = np.divmod(np.arange(count), columns)
        turns[-3:, first : first + count] = column, row, np.full(count, number)
    return turns
