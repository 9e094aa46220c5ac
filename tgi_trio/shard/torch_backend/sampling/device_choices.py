"""What came down of a step's choices, as the tokens of its rows. No tensor in this file."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import Alternatives, Choices
from tgi_trio.shard.sampling.base import MOST_TIES, alternatives
from tgi_trio.shard.torch_backend.sampling.asking import Choosing, bias_faults

NOTHING_LEFT, IS_NAN = 1, 2  # of `kernels/choosing.py`, which imports Triton


def read_choices(
    choosing: Choosing,
    found: NDArray[np.float64],
    tops: dict[int, Alternatives],
    faults: dict[int, str],
    vocab_size: int,
) -> Choices:
    """Return the tokens of every row: one, and one more for every guess that was right.

    `found` float64 [C, 3] of `DeviceSampler.choose`; `tops` by choice; `faults` by choice, of those
    whose masks could not be made.
    """
    faults = dict(faults)
    for owner, why in bias_faults(choosing.rows, vocab_size).items():
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
    tops: dict[int, Alternatives] = {}
    for choice, owner in enumerate(choosing.owners.tolist()):
        wanted = choosing.rows[owner].sampling.top_n
        if not wanted:
            continue
        names, bits = listed[choice].T
        there = names >= 0
        names, values = names[there], bits[there].view(np.float32)
        order = np.lexsort((names, -values))[: max(MOST_TIES, wanted)]
        kept = np.ones(len(order), np.bool_)
        tops[choice] = alternatives(names[order], values[order].astype(np.float64), kept, wanted)
    return tops


def _why_not(fault: int, position: int) -> str:
    if fault == NOTHING_LEFT:
        return "no token can follow: grammar, min_tokens and logit_bias together forbid all"
    value = "NaN" if fault == IS_NAN else "infinity"
    return f"the model's logits contain {value} at position {position - 1}"
