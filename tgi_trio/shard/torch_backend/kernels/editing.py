"""Changing scores on the device: watermarks, penalties, biases, the ban on EOS and grammars.

In TGI's order, as a part of a row passes through a program's registers: see `surveying.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def edit_part(
    score,  # float32 [PART]
    own,  # float32: memory of the row's own, written at `at`
    at,  # int32 [PART]: the tokens, of part `part` of the row
    part,
    row,
    rows,
    vocab,
    words,
    counts,  # int32 [slots, vocab], as `count_tokens` leaves them
    slot,  # of the row, -1: no penalties
    starts,  # int32 [3, R + 1]: where a row's entries begin: news of counts, guesses, biases
    entries,  # int32 [N, 2]: id and float32 bits of a bias; an id once per row's biases
    begin,  # of the row's biases
    end,
    frequency,  # float64 [R]
    presence,  # float64 [R]
    unit,  # float64 [R] what counts are divided by
    repetition,  # float32 [R], 1: none
    early,  # of the row, 1: EOS may not follow yet
    eos,  # int32 [EOS]
    bits,  # int32 [M, words]: bit i % 32 of word i // 32 is token i's
    green,  # row of `bits`: tokens with a bit get `amount` more, -1: none does
    allowed,  # row of `bits`: tokens without one cannot follow, -1: all can
    amount,
    EOS: tl.constexpr,  # how many
    PART: tl.constexpr,
    STRIP: tl.constexpr,  # scores or biases changed together
):
    """Return the part's scores as they are chosen from, which are in memory as well."""
    there = at < vocab
    if green >= 0:
        score = tl.where(has_bit(bits, green, words, at, there), score + amount, score)
    if (slot >= 0) | (end > begin):  # in memory: registers hold no more, and biases lie anywhere
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
    own,  # float32: the row's scores, changed from `begin` to `end`
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
    """Apply penalties to a part of a row's scores."""
    heat, flat = tl.load(frequency + row), tl.load(presence + row)
    length, penalty = tl.load(unit + row), tl.load(repetition + row)
    first = starts + rows + 1 + row
    first_guess, last_guess = tl.load(first), tl.load(first + 1)
    for low in range(begin, end, STRIP):
        at = low + tl.arange(0, STRIP)
        there = at < end
        number = tl.load(counts + at, mask=there, other=0)
        for guess in range(first_guess, last_guess):  # as if it were right
            number += tl.where(at == tl.load(entries + 2 * guess), 2, 0)
        old = tl.load(own + at, mask=there, other=0.0)
        again = tl.where(old < 0, old * penalty, old / penalty)
        new = tl.where(number > 0, again, old)
        times = (number >> 1).to(tl.float32)
        less = (heat * (times / length) + flat).to(tl.float32)
        tl.store(own + at, tl.where(times > 0, new - less, new), mask=there)
# fmt: on


@triton.jit
def has_bit(bits, which, words, at, there):
    """Return which tokens `at` have their bit in row `which` of a table."""
    word = tl.load(bits + which.to(tl.int64) * words + at // 32, mask=there, other=0)
    return ((word >> (at % 32)) & 1) != 0
