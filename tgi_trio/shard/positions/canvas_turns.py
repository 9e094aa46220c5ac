"""Rotary positions of images on a canvas, with the marks around them (MiniCPM-V 4.7).

An image's slices lie on its canvas as they do on the image. The whole image, which stands before
them, is stretched over all of it. Marks are at the corners of what they enclose.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.media.prompt_geometry import ImageGrid, Ints


def turn_by_canvases(
    ids: NDArray[np.int32], images: Sequence[Sequence[ImageGrid]], marks: Set[int]
) -> Ints:
    """Return three positions [3, N] of a prompt's tokens, up to the marks behind its last image.

    `images`: of each, in order, the whole and its slices. `marks`: ids of marks and of the newline
    between rows of slices. They are what transformers' `get_rope_index` returns.
    """
    turns: Ints = np.zeros((3, len(ids)), np.int64)
    place = position = 0
    for parts in images:
        first = max(parts[0].first - 1, 0)  # of the mark
        if first > place:
            turns[:, place:first] = position + np.arange(first - place)
            position += first - place
        place = _end(parts[-1])
        while place < len(ids) and int(ids[place]) in marks:
            place += 1
        position += _lay_image(turns[:, :place], parts, position) + 1
    return turns[:, :place]


def _lay_image(turns: Ints, parts: Sequence[ImageGrid], origin: int) -> int:
    """Write the positions of an image and its marks, with which `turns` end, from `origin` on.

    Returns the longer side of its canvas.
    """
    whole, *slices = parts
    beside = _count_columns(slices)
    size = np.array([whole.rows, whole.columns])
    if slices:
        own = np.array([slices[0].rows, slices[0].columns])
        size = own * (len(slices) // beside, beside)
    turns[:, max(whole.first - 1, 0) :] = origin
    if whole.first:
        turns[1:, whole.first - 1] = max(origin - 1, 0)
    if _end(whole) < turns.shape[1]:
        turns[1:, _end(whole)] = origin + size
    rows, columns = _spread(whole.rows, int(size[0])), _spread(whole.columns, int(size[1]))
    _lay_grid(turns, whole, origin + rows, origin + columns)
    for i, part in enumerate(slices):
        corner = origin + own * divmod(i, beside)
        turns[1:, part.first - 1] = corner
        if _end(part) < turns.shape[1]:
            turns[1:, _end(part)] = corner + np.array([part.rows - 1, part.columns - 1])
        _lay_grid(
            turns, part, corner[0] + np.arange(part.rows), corner[1] + np.arange(part.columns)
        )
    for i, (part, following) in enumerate(pairwise(slices)):
        between = slice(_end(part) + 1, following.first - 1)  # the end of a row
        turns[1, between] = origin + (i // beside + 1) * slices[0].rows - 1
        turns[2, between] = origin + size[1]
    return int(size.max())


def _end(part: ImageGrid) -> int:
    return part.first + part.rows * part.columns


def _count_columns(slices: Sequence[ImageGrid]) -> int:
    """Return how many slices are in a row: more than their two marks is behind its last one."""
    for i, (part, following) in enumerate(pairwise(slices), start=1):
        if following.first - _end(part) > 2 and len(slices) % i == 0:
            return i
    return max(len(slices), 1)


def _lay_grid(turns: Ints, part: ImageGrid, rows: Ints, columns: Ints) -> None:
    both = np.stack(np.broadcast_arrays(rows[:, None], columns))
    turns[1:, part.first : _end(part)] = both.reshape(2, -1)


def _spread(count: int, length: int) -> Ints:
    """Return `count` whole numbers from 0 to `length` - 1, as evenly as float32 has them."""
    if count == 1:
        return np.zeros(1, np.int64)
    step, place = np.float32(length - 1) / np.float32(count - 1), np.arange(count)
    last = np.float32(length - 1) - step * (count - 1 - place).astype(np.float32)
    found = np.where(place < count // 2, step * place.astype(np.float32), last)
    return np.rint(found).astype(np.int64)
