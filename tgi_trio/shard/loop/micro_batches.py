"""Divides rows among the micro-batches in flight in a pipeline of stages."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.loop.row_table import RowTable


def find_others(table: RowTable, wanted: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """Return [n] which rows are of other micro-batches than the next, of `count`.

    `wanted` [n]: tokens that each row could compute now. A micro-batch gets an equal share of the
    rows that can move, the first that are in no other. As many as are under way hold all of them
    between them, so none is left out for ever.
    """
    others = table.in_flight[: len(wanted)].copy()
    free = np.flatnonzero(~others & (wanted > 0))
    share = math.ceil((len(free) + np.count_nonzero(others)) / count)
    others[free[share:]] = True
    return others
