"""Editing scores on the device: watermarks, penalties, biases, the ban on EOS and grammars.

They are applied in TGI's order, to a part of a row in a program's registers; see `surveying.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def edit_part(
    score,  # float32 [PART]
    own,  # float32: the row's memory for edited scores, written at `at`
    at,  # int32 [PART]: token ids, of part `part` of the row
    part,
    row,
    rows,
    vocab,
    words,
    counts,  # int32 [slots, vocab], from `count_tokens`
    slot,  # the row's counts, -1: no penalties
    starts,  # int32 [3, R + 1]: where a row's entries begin: of counts, drafts and biases
    entries,  # int32 [N, 2]: token id and float32 bits of a bias; an id occurs once among biases
    begin,  # the row's biases
    end,
    frequency,  # float64 [R]
    presence,  # float64 [R]
    unit,  # float64 [R]: divisor of counts
    repetition,  # float32 [R], 1: none
    early,  # 1: the row may not end with EOS yet
    eos,  # int32 [EOS]
    bits,  # int32 [M, words]: bit i % 32 of word i // 32 belongs to token i
    green,  # the row of `bits` whose tokens get `amount` added, -1: none
    allowed,  # the row of `bits` whose tokens are allowed, -1: all are
    amount,
    EOS: tl.constexpr,  # number of EOS tokens
    PART: tl.constexpr,
    STRIP: tl.constexpr,  # scores or biases edited at a time
):
    """Return the part's edited scores, which are stored to memory as well."""
    there = at < vocab
    if green >= 0:
        score = tl.where(has_bit(bits, green, words, at, there), score + amount, score)
    if (slot >= 0) | (end > begin):  # by way of memory: registers are full, biases anywhere
        tl.store(own + at, score, mask=there)
        tl.debug_barrier()
        if slot >= 0:
            penalise(
                own, part * PART, tl.minimum((part + 1) * PART, vocab), row, rows,
                counts + slot.to(tl.int64) * vocab, starts, entries,
                frequency, presence, unit, repetition, STRIP,
            )
            tl.debug_barrier()
        for low in range(begin, end, STRIP):
            which = low + tl.arange(0, STRIP)
            token = tl.load(entries + 2 * which, mask=which < end, other=-1)
            inside = (token >= part * PART) & (token < (part + 1) * PART)
            bias = tl.load(entries + 2 * which + 1, mask=inside, other=0)
            old = tl.load(own + token, mask=inside, other=0.0)
            tl.store(own + token, old + bias.to(tl.float32, bitcast=True), mask=inside)
        tl.debug_barrier()
        score = tl.load(own + at, mask=there, other=float("-inf"))
    if early != 0:
        for i in range(EOS):
            score = tl.where(at == tl.load(eos + i), float("-inf"), score)
    if allowed >= 0:
        score = tl.where(has_bit(bits, allowed, words, at, there), score, float("-inf"))
    tl.store(own + at, score, mask=there)
    return score


@triton.jit
def penalise(
    own,  # float32: the row's scores, edited from `begin` to `end`
    begin,
    end,
    row,
    rows,
    counts,  # int32 [vocab]
    starts,
    entries,
    frequency,
    presence,
    unit,
    repetition,
    STRIP: tl.constexpr,
):
    """Apply penalties to a part of a row's scores, in memory."""
    often, flat = tl.load(frequency + row), tl.load(presence + row)
    length, penalty = tl.load(unit + row), tl.load(repetition + row)
    first = starts + rows + 1 + row
    first_draft, last_draft = tl.load(first), tl.load(first + 1)
    for low in range(begin, end, STRIP):
        at = low + tl.arange(0, STRIP)
        there = at < end
        number = tl.load(counts + at, mask=there, other=0)
        for draft in range(first_draft, last_draft):  # counted as if it were right
            number += tl.where(at == tl.load(entries + 2 * draft), 2, 0)
        old = tl.load(own + at, mask=there, other=0.0)
        again = tl.where(old < 0, old * penalty, old / penalty)
        new = tl.where(number > 0, again, old)
        times = (number >> 1).to(tl.float32)
        less = (often * (times / length) + flat).to(tl.float32)
        tl.store(own + at, tl.where(times > 0, new - less, new), mask=there)
# fmt: on


@triton.jit
def has_bit(bits, which, words, at, there):
    """Return which of the tokens `at` have their bit set in row `which` of a table."""
    word = tl.load(bits + which.to(tl.int64) * words + at // 32, mask=there, other=0)
    return ((word >> (at % 32)) & 1) != 0
