"""Listing the top tokens of a row, without a sort.

Each lane of a program keeps the best key that it has seen. Take the lanes' keys in descending
order: the one at the rank of the number of wanted tokens is a lower bound, as that many lanes have
a token at least as good, and few other tokens exceed it. So two passes over the row or its
shortlist suffice where scores are not tied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.thresholds import LOWEST, key_of, score_of

_HIGHEST = tl.constexpr(1)  # above the key of any log-probability


@triton.jit
def list_best(
    into,  # int32 [room, 2]: ids and bits of float32 log-probabilities, unordered; (-1, -1): unused
    lanes,  # int32 [BLOCK]: the best key of each lane
    base,  # float32 [size]: log-probabilities, -inf for tokens that do not survive
    names,  # float32 [size]: the tokens' ids, if `named`; otherwise ids are places
    named,
    wanted,  # least number of tokens, if as many survive; at most room / 2
    room,
    size,
    BLOCK: tl.constexpr,
):
    """List the best survivors: all above the last wanted one, and some of its ties, by id."""
    place = tl.arange(0, BLOCK)
    bound, high = tl.full([], 0, tl.int32) + LOWEST, tl.full([], 0, tl.int32) + _HIGHEST
    while high - bound > 1:
        middle = bound + (high - bound) // 2
        enough = tl.sum((lanes >= middle).to(tl.int32), 0) >= wanted
        bound, high = tl.where(enough, middle, bound), tl.where(enough, high, middle)
    # If more survive than there is room for, the bound is raised by the keys of all tokens.
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
        level = level & (nth < wanted)  # these are written from the end, the others from the start
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
    """Return the keys of log-probabilities; that of -inf is below any number's."""
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
