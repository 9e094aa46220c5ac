"""Selecting what an index scores best: the k best of a row (top-k by radix), and their slots.

An index scores units of a sequence, one or several tokens each. The best are found without a sort,
digit by digit of their bit patterns, and listed in ascending order; their tokens' slots are a block
table with pages of one token, over which the attention kernels attend.

A short row is held in registers. Of a longer one, those units are kept first that are as good as
the one of a certain rank in a sample of the row: a few more than are selected, wherever the scores
lie. They are held in registers in turn. If they are too few or too many, as with many ties, all of
the row is read five times instead. Several programs may share a row, each with a part of it; the
last one to finish selects. No program waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.thresholds import key_of

_DIGIT = tl.constexpr(8)  # bits of a key that one pass looks at
_DIGITS = tl.constexpr(4)
_BINS = tl.constexpr(1 << 8)
_FINE = tl.constexpr(11)  # bits that say where in its stretch of a row a unit of a sample lies
_PLACES = tl.constexpr(1 << 11)


# fmt: off
@triton.jit(do_not_specialize=["first", "stride", "depth"])
def select_best(
    units,  # int32 [N, MOST], written: the numbers of the best, ascending
    found,  # int32 [N], written: how many there are
    slots,  # int32 [N, WIDTH], written: see `list_tokens`
    listed,  # int32 [N], written: how many of them are there
    scores,  # float32 [N, stride]; not read where no more units are visible than MOST
    visible,  # int32 [N]: units with scores, the first of a row
    kept,  # int32 [N, programs of a row, depth], written: units that each has kept
    amounts,  # int32 [N, PROGRAMS], written: how many; used with PROGRAMS only, as `arrived`
    arrived,  # int32 [N]: programs that have finished; 0 before and after
    tables,  # int32: rows of `width` block numbers; these five are read with WIDTH only
    width,  # int32 [1]
    contexts,  # int32 [R]
    query_starts,  # int32 [R + 1]
    rows,  # int32 [T]: the row of each token
    first,  # the token with which scores begin
    stride,
    depth,  # BLOCK, or as much as a program reads of the longest row
    MOST: tl.constexpr,
    UNIT: tl.constexpr,  # tokens of a unit
    TAIL: tl.constexpr,
    HEADS: tl.constexpr,  # rows of a token: each KV head's; its slots are those of the head alone
    WIDTH: tl.constexpr,  # 0: slots are not listed
    PAGE: tl.constexpr,
    LISTED: tl.constexpr,  # slots that are listed at a time
    PROGRAMS: tl.constexpr,  # of a row, at most: a power of two; 0: a row has one
    PART: tl.constexpr,  # scores of which units are kept at a time
    BLOCK: tl.constexpr,  # scores that are held in registers
    SAMPLE: tl.constexpr,  # scores of a longer row that are looked at first
):
    """Select a row's MOST best scores: of equal ones the first; NaN is as low as -inf.

    Then list the slots of their tokens.
    """
    row = tl.program_id(1).to(tl.int64)
    count = tl.load(visible + row)
    units += row * MOST
    scores += row * stride
    kept += row * tl.num_programs(0) * depth
    candidates = tl.where(tl.program_id(0) == 0, 0, -1)  # -1: another program selects
    if count > BLOCK:
        candidates = keep_candidates(
            kept, amounts + row * PROGRAMS, arrived + row, scores, count, depth,
            MOST, PROGRAMS, PART, BLOCK, SAMPLE,
        )
    if candidates >= 0:
        chosen = tl.minimum(count, MOST)
        tl.store(found + row, chosen)
        at = tl.arange(0, BLOCK)
        if count <= MOST:
            for low in range(0, count, BLOCK):
                tl.store(units + low + at, low + at, mask=low + at < count)
        elif count <= BLOCK:
            place = rank_best(load_keys(scores, at, at < count), at < count, MOST)
            tl.store(units + place, at, mask=place >= 0)
        elif (candidates >= MOST) & (candidates <= BLOCK):
            there = at < candidates
            if PROGRAMS:
                own = kept + find_places(
                    amounts + row * PROGRAMS, candidates, depth, PROGRAMS, BLOCK
                )
            else:
                own = kept + at
            key = load_keys(scores, tl.load(own, mask=there, other=0), there)
            place = rank_best(key, there, MOST)
            tl.store(units + place, tl.load(own, mask=there, other=0), mask=place >= 0)
        else:
            select_from_row(units, scores, count, MOST, BLOCK)
        if WIDTH:
            tl.debug_barrier()  # units are written before they are read
            list_tokens(
                slots, listed, units, chosen, tables, width, contexts, query_starts, rows, first,
                row, UNIT, TAIL, HEADS, WIDTH, PAGE, LISTED,
            )


@triton.jit
def keep_candidates(
    kept, amounts, arrived, scores, count, depth,
    MOST: tl.constexpr, PROGRAMS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Keep the units of a program's part of a row that are good enough, ascending.

    Return how many of them the row has, to the program that finishes last; -1 to the others.
    """
    candidates = count * 0 - 1
    span = tl.cdiv(tl.cdiv(count, PART), tl.num_programs(0)) * PART  # units of a program
    begin, end = tl.program_id(0) * span, tl.minimum((tl.program_id(0) + 1) * span, count)
    if begin < end:
        cut = find_cut(scores, count, MOST, SAMPLE)
        kept += tl.program_id(0) * depth
        amount = count * 0
        for low in range(begin, end, PART):
            at = low + tl.arange(0, PART)
            own = ((load_keys(scores, at, at < end) >= cut) & (at < end)).to(tl.int32)
            place = amount + tl.cumsum(own, 0) - 1
            tl.store(kept + place, at, mask=(own > 0) & (place < depth))
            amount += tl.sum(own, 0)
        if PROGRAMS:
            tl.store(amounts + tl.program_id(0), amount)
            tl.debug_barrier()  # what a program keeps is written before it counts as arrived
            programs = tl.cdiv(count, span)
            if tl.atomic_add(arrived, 1) == programs - 1:
                tl.store(arrived, 0)
                which = tl.arange(0, PROGRAMS)
                each = tl.load(amounts + which, mask=which < programs, other=0)
                candidates = tl.sum(each, 0)
                begins = tl.where(which < programs, tl.cumsum(each, 0) - each, BLOCK)
                tl.debug_barrier()  # all threads have read what is overwritten
                tl.store(amounts + which, begins)
                tl.debug_barrier()  # where parts begin is written before it is read
        else:
            candidates = amount
            tl.debug_barrier()  # units are written before they are read
    return candidates


@triton.jit
def find_cut(scores, count, MOST: tl.constexpr, SAMPLE: tl.constexpr):
    """Return a key such that about MOST units of a row, and hardly fewer, are not below it.

    It is that of a rank in a sample, one unit of each stretch of the row, at a place that follows
    no pattern. Of the MOST best the sample has a number with a known mean and, if no place is
    preferred, a deviation of its root: four of them are added.
    """
    number = tl.arange(0, SAMPLE)
    within = (number.to(tl.uint32) * 2654435769) >> (32 - _FINE)
    at = (number.to(tl.int64) << _FINE) + within.to(tl.int64)
    at = (at * count) // (_PLACES * SAMPLE)
    mean = SAMPLE * MOST / count.to(tl.float32)
    rank = tl.minimum((mean + 4.0 * tl.sqrt(mean) + 4.0).to(tl.int32), SAMPLE)
    digits, _ = find_rank(load_keys(scores, at, number < SAMPLE), number < SAMPLE, rank)
    return digits


@triton.jit
def find_places(amounts, candidates, depth, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Return where candidates are kept, int32 [BLOCK]; `amounts`: those before each program's."""
    at = tl.arange(0, BLOCK)
    begins = tl.load(amounts + tl.arange(0, PROGRAMS))
    # A candidate is the last program's that begins no later: programs without any precede it.
    owner = tl.cumsum(tl.histogram(begins, BLOCK, mask=begins < candidates), 0) - 1
    owner = tl.where(at < candidates, owner, 0)
    return owner * depth + at - tl.load(amounts + owner, mask=at < candidates, other=0)


@triton.jit
def rank_best(key, there, MOST: tl.constexpr):
    """Return the places of keys among the MOST best of those that are `there`; else -1."""
    digits, room = find_rank(key, there, MOST)
    same = ((key == digits) & there).to(tl.int32)
    best = there & ((key > digits) | ((same > 0) & (tl.cumsum(same, 0) <= room)))
    return tl.where(best, tl.cumsum(best.to(tl.int32), 0) - 1, -1)


@triton.jit
def find_rank(key, there, rank):
    """Return the key of a rank, and how many of the same are no lower in rank."""
    digits, room = start_digits(rank)
    for number in range(_DIGITS):  # not unrolled, which would take long to compile
        digits, room = add_digit(digits, room, count_digits(key, there, digits, number))
    return digits, room


@triton.jit
def select_from_row(units, scores, count, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Select the best of a row, in five passes.

    A pass counts how often each value of a digit occurs among the keys that begin with the digits
    found so far: with the one in which the last of the best lies.
    """
    at = tl.arange(0, BLOCK)
    digits, room = start_digits(count * 0 + MOST)
    for number in range(_DIGITS):
        here = tl.zeros([_BINS], tl.int32)
        for low in range(0, count, BLOCK):
            key = load_keys(scores, low + at, low + at < count)
            here += count_digits(key, low + at < count, digits, number)
        digits, room = add_digit(digits, room, here)
    listed, ties = count * 0, count * 0
    for low in range(0, count, BLOCK):
        key = load_keys(scores, low + at, low + at < count)
        same = ((key == digits) & (low + at < count)).to(tl.int32)
        tie = ties + tl.cumsum(same, 0)
        best = ((key > digits) & (low + at < count)) | ((same > 0) & (tie <= room))
        place = listed + tl.cumsum(best.to(tl.int32), 0) - 1
        tl.store(units + place, low + at, mask=best)
        listed += tl.sum(best.to(tl.int32), 0)
        ties += tl.sum(same, 0)


@triton.jit
def start_digits(rank):
    """Return the digits of the key of a rank as far as found, and its rank among the alike."""
    return tl.zeros([], tl.int32).to(tl.uint32), tl.zeros([], tl.int32) + rank


@triton.jit
def count_digits(key, there, digits, number):
    """Return how often each value of a digit occurs among keys that begin with `digits`."""
    known = key >> (32 - _DIGIT * (number + 1))
    own = (known & (_BINS - 1)).to(tl.int32)
    return tl.histogram(own, _BINS, mask=there & ((known >> _DIGIT) == digits))


@triton.jit
def add_digit(digits, room, here):
    """Return digits with one more, and how many of those with these are among the best."""
    above = tl.sum(here, 0) - tl.cumsum(here, 0)
    digit = tl.sum((above >= room).to(tl.int32), 0)
    room -= tl.sum(tl.where(tl.arange(0, _BINS) == digit, above, 0), 0)
    return (digits << _DIGIT) | digit.to(tl.uint32), room


@triton.jit
def load_keys(scores, at, there):
    """Return uint32 keys that are ordered as scores are; what is not `there` is lowest."""
    score = tl.load(scores + at, mask=there, other=float("-inf"))
    score = tl.where(score == score, score, float("-inf"))
    return key_of(score).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def list_tokens(
    slots,  # int32 [N, WIDTH], written
    listed,  # int32 [N], written
    units,  # int32 [MOST], ascending: the row's
    chosen,  # how many there are
    tables, width, contexts, query_starts, rows, first, which,
    UNIT: tl.constexpr,
    # Units are whole, and the tokens behind the last whole one are listed, too. Otherwise the last
    # unit may have tokens behind the one that asks, which are left out.
    TAIL: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):
    """List the slots of the tokens of a row's units."""
    token, head = first + which // HEADS, (which % HEADS).to(tl.int32)
    row = tl.load(rows + token).to(tl.int64)
    seen = find_seen(contexts, query_starts, row, token)
    chosen *= UNIT
    behind = 0
    if TAIL:
        behind = seen % UNIT
    elif UNIT > 1:
        last = tl.load(units + tl.maximum(chosen // UNIT - 1, 0))
        chosen -= tl.maximum(0, (last + 1) * UNIT - seen)
    tl.store(listed + which, chosen + behind)
    table = tables + row * tl.load(width)
    for low in range(0, WIDTH, BLOCK):
        at = low + tl.arange(0, BLOCK)
        place = tl.load(units + at // UNIT, mask=at < chosen, other=0) * UNIT + at % UNIT
        place = tl.where(at < chosen, place, seen - behind + at - chosen)
        there = at < chosen + behind
        block = tl.load(table + place // PAGE, mask=there, other=0)
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
