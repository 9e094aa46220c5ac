"""The media of a PREFILL's rows as columns of the frame, and back."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import CorruptFrame
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.images import KEY_BYTES, ArenaPlace, SequenceImage

_KEYS = tuple(f"image_key_{i}" for i in range(KEY_BYTES // 8))


def image_columns(rows: ListLike[tuple[SequenceImage, ...]]) -> dict[str, NDArray[Any]]:
    """Return the columns of the rows' images; none where no row has any."""
    if not any(rows):
        return {}
    images = [image for row in rows for image in row]
    runs = np.array([run for image in images for run in image.runs], np.uint32).reshape(-1, 2)
    keys = np.frombuffer(b"".join(image.key for image in images), "<u8").reshape(len(images), -1)
    columns: dict[str, NDArray[Any]] = {
        "image_row": np.repeat(np.arange(len(rows)), [len(row) for row in rows]),
        "image_first": np.array([image.first for image in images], np.uint32),
        "image_tokens": np.array([image.tokens for image in images], np.uint32),
        "image_offset": np.array([image.place.offset for image in images], np.uint64),
        "image_bytes": np.array([image.place.nbytes for image in images], np.uint64),
        "image_run_count": np.array([len(image.runs) for image in images], np.uint32),
        "run_offset": runs[:, 0],
        "run_length": runs[:, 1],
    }
    return columns | {name: keys[:, i] for i, name in enumerate(_KEYS)}


def split_images(frame: Frame) -> dict[int, tuple[SequenceImage, ...]]:
    """Return the images of a PREFILL frame by row, of those that have any.

    Raises CorruptFrame for images of no row, and for runs of none.
    """
    rows = frame.column("image_row").tolist()
    if not rows:
        return {}
    counts = frame.column("image_run_count").tolist()
    if sum(counts) != frame.word("image_runs") or max(rows) >= frame.word("rows"):
        raise CorruptFrame(f"PREFILL: {len(rows)} images do not fit its rows or their runs")
    keys = np.stack([frame.column(name) for name in _KEYS], axis=1).astype("<u8")
    offsets, lengths = frame.column("run_offset").tolist(), frame.column("run_length").tolist()
    names = ("image_first", "image_tokens", "image_offset", "image_bytes")
    numbers = zip(*(frame.column(name).tolist() for name in names), strict=True)
    found: dict[int, tuple[SequenceImage, ...]] = {}
    at = 0
    for i, (first, tokens, offset, nbytes) in enumerate(numbers):
        own = slice(at, at + counts[i])
        at += counts[i]
        runs = tuple(zip(offsets[own], lengths[own], strict=True))
        place = ArenaPlace(offset, nbytes)
        image = SequenceImage(first, tokens, runs, keys[i].tobytes(), place)
        found[rows[i]] = (*found.get(rows[i], ()), image)
    return found
