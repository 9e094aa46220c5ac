"""Selecting what an index scores best: the k best of a row (top-k by radix), and their slots.

An index scores units of a sequence, one or several tokens each. The best are found without a sort,
digit by digit of their bit patterns, and listed in ascending order; their tokens' slots are a block
table with pages of one token, over which the attention kernels attend.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.thresholds import key_of

_DIGIT = tl.constexpr(8)  # bits of a key that one pass looks at
_BINS = tl.constexpr(1 << 8)


@triton.jit(do_not_specialize=["stride"])
def select_best(
    units,  # int32 [N, MOST], written: the numbers of the best, ascending
    found,  # int32 [N], written: how many there are
    scores,  # float32 [N, stride]; not read where no more units are visible than MOST
    visible,  # int32 [N]: units with scores, the first of a row
    stride,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Select a row's MOST best scores: of equal ones the first; NaN is as low as -inf.

    A pass over the row counts how often each value of a digit occurs among the keys that begin with
    the digits found so far: with the one in which the last of the best lies.
    """
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(visible + row)
    tl.store(found + row, tl.minimum(count, MOST))
    units += row * MOST
    at = tl.arange(0, BLOCK)
    if count <= MOST:
        for low in range(0, count, BLOCK):
            tl.store(units + low + at, low + at, mask=low + at < count)
    else:
        scores += row * stride
        digits = tl.zeros([], tl.int32).to(tl.uint32)  # of the last of the best
        room = count * 0 + MOST  # how many of those with these digits are among the best
        for number in tl.static_range(4):
            here = tl.zeros([_BINS], tl.int32)
            for low in range(0, count, BLOCK):
                key = load_keys(scores, low + at, count)
                alike = low + at < count
                if number > 0:
                    alike = alike & ((key >> (32 - _DIGIT * number)) == digits)
                own = (key >> (32 - _DIGIT * (number + 1))) & (_BINS - 1)
                here += tl.histogram(own.to(tl.int32), _BINS, mask=alike)
            above = tl.sum(here, 0) - tl.cumsum(here, 0)
            digit = tl.sum((above >= room).to(tl.int32), 0)
            room -= tl.sum(tl.where(tl.arange(0, _BINS) == digit, above, 0), 0)
            digits = (digits << _DIGIT) | digit.to(tl.uint32)
        listed, ties = count * 0, count * 0
        for low in range(0, count, BLOCK):
            key = load_keys(scores, low + at, count)
            same = ((key == digits) & (low + at < count)).to(tl.int32)
            tie = ties + tl.cumsum(same, 0)
            best = ((key > digits) & (low + at < count)) | ((same > 0) & (tie <= room))
            place = listed + tl.cumsum(best.to(tl.int32), 0) - 1
            tl.store(units + place, low + at, mask=best)
            listed += tl.sum(best.to(tl.int32), 0)
            ties += tl.sum(same, 0)


@triton.jit
def load_keys(scores, at, count):
    """Return uint32 keys that are ordered as scores are."""
    score = tl.load(scores + at, mask=at < count, other=float("-inf"))
    score = tl.where(score == score, score, float("-inf"))
    return key_of(score).to(tl.uint32, bitcast=True) ^ 0x80000000


# fmt: off
@triton.jit(do_not_specialize=["first"])
def list_tokens(
    slots,  # int32 [N, WIDTH], written
    counts,  # int32 [N], written: how many of them are there
    units,  # int32 [N, MOST], ascending
    found,  # int32 [N]
    tables,  # int32: rows of `width` block numbers
    width,  # int32 [1]
    contexts,  # int32 [R]
    query_starts,  # int32 [R + 1]
    rows,  # int32 [T]: the row of each token
    first,  # the token with which the list begins
    MOST: tl.constexpr,
    UNIT: tl.constexpr,  # tokens of a unit
    # Units are whole, and the tokens behind the last whole one are listed, too. Otherwise the last
    # unit may have tokens behind the one that asks, which are left out.
    TAIL: tl.constexpr,
    HEADS: tl.constexpr,  # rows of a token: each KV head's; its slots are those of the head alone
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the slots of some tokens of a row's units."""
    which = tl.program_id(0).to(tl.int64)
    token, head = first + which // HEADS, (which % HEADS).to(tl.int32)
    row = tl.load(rows + token).to(tl.int64)
    seen = find_seen(contexts, query_starts, row, token)
    own = units + which * MOST
    chosen = tl.load(found + which) * UNIT
    behind = 0
    if TAIL:
        behind = seen % UNIT
    elif UNIT > 1:
        last = tl.load(own + tl.maximum(chosen // UNIT - 1, 0))
        chosen -= tl.maximum(0, (last + 1) * UNIT - seen)
    if tl.program_id(1) == 0:
        tl.store(counts + which, chosen + behind)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(own + at // UNIT, mask=at < chosen, other=0) * UNIT + at % UNIT
    place = tl.where(at < chosen, place, seen - behind + at - chosen)
    there = at < chosen + behind
    block = tl.load(tables + row * tl.load(width) + place // PAGE, mask=there, other=0)
    slot = (block * PAGE + place % PAGE) * HEADS + head
    tl.store(slots + which * WIDTH + at, slot, mask=there)
# fmt: on


@triton.jit
def find_seen(contexts, query_starts, row, token):
    """Return how many tokens of their rows tokens see, themselves included, int32.

    It is 0 for the padding of a recording, whose row has no context.
    """
    later = tl.load(query_starts + row + 1) - 1 - token
    return tl.maximum(tl.load(contexts + row) - later, 0).to(tl.int32)
