"""The best tokens of one row, beside the one that is chosen: found without a sort.

Every lane of a program keeps the best key it has seen. As many lanes as tokens are wanted have one
that is at least the lane's of that rank, so that is a bound below which no wanted token lies, and
hardly more than the wanted ones lie above: two passes over the row, where scores are not tied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.thresholds import key_of

_LOWEST = tl.constexpr(-2139095040)  # the key of the lowest finite number
_HIGHEST = tl.constexpr(1)  # above that of every log-probability


@triton.jit(do_not_specialize=["stride", "vocab"])
def list_best(
    listed,  # int32 [R, ROOM, 2]: ids and bits of float32 log-probabilities, unordered; -1: nobody
    scores,  # float32 [R, stride]: log-probabilities, -inf where a token does not survive
    lists,  # int32 [R]: so many at least, where as many survive; ROOM / 2 at most. 0: none
    targets,  # int64 [R]; -1: there is no row
    stride,
    vocab,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the best survivors: those above the last wanted, and of those that tie some by id."""
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(lists + row)
    if (wanted <= 0) | (tl.load(targets + row) < 0):
        return
    base, into = scores + row * stride, listed + row * ROOM * 2
    place = tl.arange(0, BLOCK)
    lanes = tl.full([BLOCK], 0, tl.int32) + _LOWEST
    for low in range(0, vocab, BLOCK):
        lanes = tl.maximum(lanes, load_keys(base, low + place, vocab))
    bound, high = tl.full([], 0, tl.int32) + _LOWEST, tl.full([], 0, tl.int32) + _HIGHEST
    while high - bound > 1:
        middle = bound + (high - bound) // 2
        enough = tl.sum((lanes >= middle).to(tl.int32), 0) >= wanted
        bound, high = tl.where(enough, middle, bound), tl.where(enough, high, middle)
    number = count_keys(base, vocab, bound, BLOCK)
    high = tl.full([], 0, tl.int32) + _HIGHEST
    while (number > ROOM) & (high - bound > 1):
        middle = bound + (high - bound) // 2
        more = count_keys(base, vocab, middle, BLOCK)
        enough = more >= wanted
        bound, high = tl.where(enough, middle, bound), tl.where(enough, high, middle)
        number = tl.where(enough, more, number)
    above, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for low in range(0, vocab, BLOCK):
        at = low + place
        key = load_keys(base, at, vocab)
        over, level = key > bound, key == bound
        nth = ties + tl.cumsum(level.to(tl.int32), 0) - 1
        level = level & (nth < wanted)  # from the end on, the others from the beginning
        slot = tl.where(level, ROOM - 1 - nth, above + tl.cumsum(over.to(tl.int32), 0) - 1)
        bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF)
        tl.store(into + 2 * slot, at, mask=over | level)
        tl.store(into + 2 * slot + 1, bits, mask=over | level)
        above += tl.sum(over.to(tl.int32), 0)
        ties += tl.sum(level.to(tl.int32), 0)
    slot = tl.arange(0, ROOM)
    nobody = tl.full([ROOM], -1, tl.int32)
    tl.store(into + 2 * slot, nobody, mask=(slot >= above) & (slot < ROOM - ties))


@triton.jit
def load_keys(base, at, vocab):
    """Return the keys of log-probabilities, lower than that of any number for -inf."""
    return key_of(tl.load(base + at, mask=at < vocab, other=float("-inf")))


@triton.jit
def count_keys(base, vocab, bound, BLOCK: tl.constexpr):
    """Return how many keys are at least `bound`."""
    number = tl.full([], 0, tl.int32)
    for low in range(0, vocab, BLOCK):
        number += tl.sum(
            (load_keys(base, low + tl.arange(0, BLOCK), vocab) >= bound).to(tl.int32), 0
        )
    return number
