"""What came down of a step's choices, as the tokens of its rows. No tensor in this file."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import Alternatives, Choices
from tgi_trio.shard.sampling.base import MOST_TIES
from tgi_trio.shard.torch_backend.sampling.asking import Choosing, repeat

NOTHING_LEFT, IS_NAN = 1, 2  # of `kernels/choosing.py`, which imports Triton


def read_choices(
    choosing: Choosing,
    found: NDArray[np.float64],
    tops: dict[int, Alternatives],
    faults: dict[int, str],
    refused: dict[int, str],
) -> Choices:
    """Return the tokens of every row: one, and one more for every guess that was right.

    `found` float64 [C, 3] of `DeviceSampler.choose`; `tops` by choice; `faults` by choice, of those
    whose masks could not be made; `refused` by row, of those that ask for what there is not.
    """
    if choosing.alone and not (faults or refused or np.count_nonzero(found[:, 2])):
        ones = repeat(1, len(found), np.int64)
        listed = {c: [top] for c, top in tops.items()} if tops else {}
        return Choices(ones, found[:, 0].astype(np.int64), found[:, 1].copy(), listed)
    faults = dict(faults)
    for owner, why in refused.items():
        for c in np.flatnonzero(choosing.owners == owner).tolist():
            faults.setdefault(c, why)
    for c in np.flatnonzero(found[:, 2]).tolist():
        faults.setdefault(c, _why_not(int(found[c, 2]), int(choosing.positions[c])))
    firsts = np.flatnonzero(choosing.aheads == 0)
    counts = np.ones(len(firsts), np.int64)
    if len(choosing) > len(firsts):
        ends = np.append(firsts[1:], len(choosing))
        for owner, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
            counts[owner] = _count_right(choosing, found, faults, first, end)
    wrong = {owner: faults[c] for owner, c in enumerate(firsts.tolist()) if c in faults}
    counts[list(wrong)] = 0
    kept = choosing.aheads < counts[choosing.owners]
    by_row: dict[int, list[Alternatives]] = {}
    for c in sorted(tops):
        if kept[c]:
            by_row.setdefault(int(choosing.owners[c]), []).append(tops[c])
    return Choices(counts, found[kept, 0].astype(np.int64), found[kept, 1], by_row, wrong)


def _count_right(
    choosing: Choosing,
    found: NDArray[np.float64],
    faults: dict[int, str],
    first: int,
    end: int,
) -> int:
    """Return how many tokens a row gets: it goes on behind a guess that was chosen.

    A fault behind right guesses comes again in the next step, for itself.
    """
    count = 1
    guesses = choosing.guesses(end - 1).tolist()
    while first + count < end and first + count not in faults:
        if int(found[first + count - 1, 0]) != guesses[count - 1]:
            break
        count += 1
    return count


def list_best(choosing: Choosing, listed: NDArray[np.int32]) -> dict[int, Alternatives]:
    """Return the alternatives of the choices that want some, best first, lower ids first in ties.

    `listed` int32 [C, room, 2]: as `kernels/listing.py` leaves them.
    """
    wanted = np.array([row.sampling.top_n for row in choosing.rows], np.int64)[choosing.owners]
    there = (listed[:, :, 0] >= 0) & (wanted > 0)[:, None]
    places = np.flatnonzero(there)  # of the flat list: `nonzero` takes ten times as long
    choices = places // listed.shape[1]
    names, bits = listed.reshape(-1, 2)[places].T
    values = bits.view(np.float32)
    order = np.lexsort((names, -values, choices))
    names, values = names[order], values[order].astype(np.float64)
    ends = np.cumsum(np.bincount(choices, minlength=len(listed)))
    # Those that tie with the last one wanted go along.
    starts = np.concatenate(([0], ends[:-1]))
    ranks = np.arange(len(names)) - starts[choices]
    lasts = np.minimum(starts + wanted, ends)[choices] - 1
    most = np.maximum(MOST_TIES, wanted)[choices]
    kept = (ranks < wanted[choices]) | ((values == values[lasts]) & (ranks < most))
    pairs = list(zip(names[kept].tolist(), values[kept].tolist(), strict=True))
    counts = np.bincount(choices[kept], minlength=len(listed))
    ends = np.cumsum(counts)
    return {
        choice: pairs[end - count : end]
        for choice, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True))
        if wanted[choice]
    }


def _why_not(fault: int, position: int) -> str:
    if fault == NOTHING_LEFT:
        return "no token can follow: grammar, min_tokens and logit_bias together forbid all"
    value = "NaN" if fault == IS_NAN else "infinity"
    return f"the model's logits contain {value} at position {position - 1}"
