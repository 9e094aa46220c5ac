"""Reading a step's choices, as the device wrote them, as tokens of its rows; no tensor here."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.alternatives import Listed
from tgi_trio.shard.contract import Choices
from tgi_trio.shard.sampling.base import MOST_TIES
from tgi_trio.shard.torch_backend.sampling.choice_settings import Choosing, TopCounts, repeat

_ID_BITS, _NOBODY = np.uint64(32), np.uint64((1 << 64) - 1)

# Why a choice has no token, by the number that `kernels/sampling/surveying.py` writes.
_WHY_NOT: Final = {
    1: "no token can follow: grammar, min_tokens, logit_bias and no_repeat_ngram_size forbid all",
    2: "the model's logits contain NaN at position {}",
    3: "the model's logits contain infinity at position {}",
}


def read_choices(
    choosing: Choosing,
    found: NDArray[np.float64],
    tops: Listed | None,
    faults: dict[int, str],
    refused: dict[int, str],
) -> Choices:
    """Return each row's tokens: one, and one more for each draft that was right.

    `found`: float64 [C, 3] of `DeviceSampler.choose`; `tops`: of the choices; `faults`: by choice,
    where no mask could be made; `refused`: by row, for parameters that the model cannot serve.
    """
    if choosing.alone and not (faults or refused or len(found[:, 2].nonzero()[0])):
        ones = repeat(1, len(found), np.int64)
        return Choices(ones, found[:, 0].astype(np.int64), found[:, 1].copy(), tops)
    faults = dict(faults)
    for owner, why in refused.items():
        for c in np.flatnonzero(choosing.owners == owner).tolist():
            faults.setdefault(c, why)
    for c in np.flatnonzero(found[:, 2]).tolist():
        faults.setdefault(c, _WHY_NOT[int(found[c, 2])].format(choosing.positions[c] - 1))
    firsts = np.flatnonzero(choosing.aheads == 0)
    counts = np.ones(len(firsts), np.int64)
    if len(choosing) > len(firsts):
        ends = np.append(firsts[1:], len(choosing))
        for owner, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
            counts[owner] = _count_right(choosing, found, faults, first, end)
    wrong = {owner: faults[c] for owner, c in enumerate(firsts.tolist()) if c in faults}
    counts[list(wrong)] = 0
    kept = choosing.aheads < counts[choosing.owners]
    tops = None if tops is None else tops.kept(kept)
    return Choices(counts, found[kept, 0].astype(np.int64), found[kept, 1], tops, wrong)


def _count_right(
    choosing: Choosing,
    found: NDArray[np.float64],
    faults: dict[int, str],
    first: int,
    end: int,
) -> int:
    """Return how many tokens a row gets: one more after each draft that was chosen.

    A fault after right drafts is left out, since it occurs again in the next step.
    """
    count = 1
    drafts = choosing.drafts(end - 1).tolist()
    while first + count < end and first + count not in faults:
        if int(found[first + count - 1, 0]) != drafts[count - 1]:
            break
        count += 1
    return count


def list_best(top_counts: TopCounts, listed: NDArray[np.int32]) -> Listed:
    """Return the choices' top tokens, best first, and lower ids first in ties.

    Tokens that tie with the last one wanted are included. `listed`: int32 [C, room, 2] from
    `kernels/sampling/listing.py`.
    """
    # As uint64: the id, and above it the bits of a number that is not positive. Ascending order is
    # best first.
    keys = np.sort(listed.view(np.uint64)[:, :, 0], axis=1)
    most, parts = top_counts.even, keys.view(np.int32)
    if 0 < most < keys.shape[1]:
        ties = parts[:, 2 * most - 1] == parts[:, 2 * most + 1]
        if not np.count_nonzero(ties):  # which also means that no place is unused
            ids = parts[:, 0 : 2 * most : 2].reshape(-1)
            logprobs = keys.view(np.float32)[:, 1 : 2 * most : 2].reshape(-1)
            return Listed(repeat(most, len(keys), np.int64), ids, logprobs)
    return _list_best(top_counts.each, keys)


def _list_best(top_counts: NDArray[np.int64], keys: NDArray[np.uint64]) -> Listed:
    """Return the top tokens of choices that want different numbers of them, or have ties."""
    most, room = int(top_counts.max(initial=0)), keys.shape[1]
    lasts = keys[np.arange(len(keys)), np.clip(top_counts, 1, room) - 1] >> _ID_BITS
    if most < room and ((keys[:, most] >> _ID_BITS) <= lasts).any():
        most = room  # some may tie with the last one
    keys = keys[:, :most]
    ranks, limits = np.arange(most), np.where(top_counts, np.maximum(MOST_TIES, top_counts), 0)
    ties = (keys >> _ID_BITS == lasts[:, None]) & (ranks < limits[:, None])
    kept = ((ranks < top_counts[:, None]) | ties) & (keys != _NOBODY)
    own = keys[kept].view(np.int32)
    return Listed(np.count_nonzero(kept, axis=1), own[::2], own.view(np.float32)[1::2])
