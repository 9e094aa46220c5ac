"""Divides a step's token budget among rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.loop.row_table import RowTable


def share_budget(
    table: RowTable, wanted: NDArray[np.int64], held: NDArray[np.bool_], token_budget: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return which rows a step has, their query tokens, and how many rows are stalled.

    `wanted`, `held`: [n], the query tokens that every row could have, and whether it is left out.
    """
    n = len(wanted)
    computed = table.computed[:n]
    prefilling = computed < table.given[:n]
    prompts = np.flatnonzero(prefilling)
    left = table.given[prompts] - computed[prompts]
    order = np.concatenate((np.flatnonzero(~prefilling), prompts[np.argsort(left, kind="stable")]))
    wanted = wanted[order]
    before = np.cumsum(wanted) - wanted
    taken = np.clip(max(token_budget, 1) - before, 0, wanted)
    if table.shaped:
        taken = _keep_spans_whole(table, order, wanted, taken, token_budget)
    stalled = int(np.count_nonzero(wanted == 0) - np.count_nonzero(held))
    return order[taken > 0], taken[taken > 0], stalled


def _keep_spans_whole(
    table: RowTable,
    order: NDArray[np.int64],
    wanted: NDArray[np.int64],
    taken: NDArray[np.int64],
    token_budget: int,
) -> NDArray[np.int64]:
    """Return `taken` [n] of the rows in `order`, with no chunk ending within a span.

    What a span leaves of the budget goes to the next prompts. If nothing fits, the first row gets a
    whole span beyond the budget, so that it can advance.
    """
    prompts = np.flatnonzero(table.computed[order] < table.given[order])  # behind all others
    left = max(token_budget, 1) - int(wanted[: len(order) - len(prompts)].sum())
    for i in prompts.tolist():
        taken[i] = max(0, min(int(wanted[i]), left))
        geometry = table.sequences[order[i]].geometry
        if geometry is not None:
            taken[i] = geometry.fit(int(table.computed[order[i]]), int(taken[i]))
        left -= int(taken[i])
    if not taken.any() and len(waiting := prompts[wanted[prompts] > 0]):
        first = int(waiting[0])
        geometry = table.sequences[order[first]].geometry
        least = 1 if geometry is None else geometry.least(int(table.computed[order[first]]))
        taken[first] = min(least, int(wanted[first]))
    return taken
