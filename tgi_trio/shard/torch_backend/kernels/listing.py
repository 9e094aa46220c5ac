"""The best tokens of one row, beside the one that is chosen: found without a sort.

Every lane of a program keeps the best key it has seen. As many lanes as tokens are wanted have one
that is at least the lane's of that rank, so that is a bound below which no wanted token lies, and
hardly more than the wanted ones lie above: two passes over the row or its shortlist, where scores
are not tied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.thresholds import LOWEST, key_of, score_of

_HIGHEST = tl.constexpr(1)  # above that of every log-probability


@triton.jit
def list_best(
    into,  # int32 [room, 2]: ids and bits of float32 log-probabilities, unordered; -1, -1: nobody
    lanes,  # int32 [BLOCK]: the best key of each lane
    base,  # float32 [size]: log-probabilities, -inf where a token does not survive
    names,  # float32 [size]: the tokens' ids, read with `named`; else they are the places
    named,
    wanted,  # so many at least, where as many survive; room / 2 at most
    room,
    size,
    BLOCK: tl.constexpr,
):
    """List the best survivors: those above the last wanted, and of those that tie some by id."""
    place = tl.arange(0, BLOCK)
    bound, high = tl.full([], 0, tl.int32) + LOWEST, tl.full([], 0, tl.int32) + _HIGHEST
    while high - bound > 1:
        middle = bound + (high - bound) // 2
        enough = tl.sum((lanes >= middle).to(tl.int32), 0) >= wanted
        bound, high = tl.where(enough, middle, bound), tl.where(enough, high, middle)
    # As many are there where all of them survive: then it is narrowed by all keys, not by lanes'.
    high, middle = tl.full([], 0, tl.int32) + _HIGHEST, bound
    number = room + 1
    while (number > room) & (high - bound > 1):
        more = count_keys(base, size, middle, BLOCK)
        enough = more >= wanted
        bound, high = tl.where(enough, middle, bound), tl.where(enough, high, middle)
        number = tl.where(enough, more, number)
        middle = bound + (high - bound) // 2
    above, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for low in range(0, size, BLOCK):
        at = low + place
        key = load_keys(base, at, size)
        over, level = key > bound, key == bound
        nth = ties + tl.cumsum(level.to(tl.int32), 0) - 1
        level = level & (nth < wanted)  # from the end on, the others from the beginning
        slot = tl.where(level, room - 1 - nth, above + tl.cumsum(over.to(tl.int32), 0) - 1)
        some = over | level
        token = tl.where(named, tl.load(names + at, mask=some & named, other=0.0).to(tl.int32), at)
        tl.store(into + 2 * slot, token, mask=some)
        tl.store(into + 2 * slot + 1, score_of(key).to(tl.int32, bitcast=True), mask=some)
        above += tl.sum(over.to(tl.int32), 0)
        ties += tl.sum(level.to(tl.int32), 0)
    for low in range(above, room - ties, BLOCK):
        nobody = tl.full([BLOCK], -1, tl.int32)
        tl.store(into + 2 * (low + place), nobody, mask=low + place < room - ties)
        tl.store(into + 2 * (low + place) + 1, nobody, mask=low + place < room - ties)


@triton.jit
def load_keys(base, at, size):
    """Return the keys of log-probabilities, lower than that of any number for -inf."""
    return key_of(tl.load(base + at, mask=at < size, other=float("-inf")))


@triton.jit
def count_keys(base, size, bound, BLOCK: tl.constexpr):
    """Return how many keys are at least `bound`."""
    number = tl.full([], 0, tl.int32)
    for low in range(0, size, BLOCK):
        number += tl.sum(
            (load_keys(base, low + tl.arange(0, BLOCK), size) >= bound).to(tl.int32), 0
        )
    return number
