"""Columns of a frame that have the items of all its rows, cut into those of each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import CorruptFrame
from tgi_trio.ipc.frame_codec import Frame


def split_column(frame: Frame, items: str, counts: str) -> list[NDArray[Any]]:
    """Cut the column `items` into consecutive pieces, as long as the column `counts` says.

    Raises CorruptFrame unless it has as many items as these are together.
    """
    flat, ends = frame.column(items), np.cumsum(frame.column(counts), dtype=np.int64)
    check_counts(frame, counts, int(ends[-1]) if len(ends) else 0, len(flat))
    return np.split(flat, ends[:-1]) if len(ends) else []


def check_counts(frame: Frame, counts: str, said: int, there: int) -> None:
    """Raise CorruptFrame unless a column of counts says as many items as are there."""
    if said != there:
        raise CorruptFrame(f"{frame.kind.name}: {counts} says {said} items, and {there} are there")
