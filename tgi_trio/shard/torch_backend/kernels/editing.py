"""Changing scores on the device: penalties, biases and the ban on EOS, in TGI's order."""

from __future__ import annotations

import triton
import triton.language as tl


# Sizes are not specialised: a new one must not make Triton compile another variant.
@triton.jit(do_not_specialize=["rows", "stride", "vocab"])
def edit_scores(
    scores,  # float32 [R, stride]
    counts,  # int32 [slots, vocab], as `count_tokens` leaves them
    slots,  # int32 [R], -1: no penalties
    starts,  # int32 [3, R + 1]: where a row's entries begin: news of counts, guesses, biases
    entries,  # int32 [N, 2]: id and float32 bits of a bias; an id once per row's biases
    frequency,  # float64 [R]
    presence,  # float64 [R]
    unit,  # float64 [R] what counts are divided by
    repetition,  # float32 [R], 1: none
    early,  # int32 [R]: EOS may not follow yet
    eos,  # int32 [EOS]
    rows,
    stride,
    vocab,
    EOS: tl.constexpr,  # how many
    PADDED_EOS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply penalties, biases and the ban on EOS to a row's scores, in TGI's order."""
    row = tl.program_id(0)
    base = scores + row.to(tl.int64) * stride
    place = tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    if slot >= 0:
        own = counts + slot.to(tl.int64) * vocab
        heat, flat = tl.load(frequency + row), tl.load(presence + row)
        length, penalty = tl.load(unit + row), tl.load(repetition + row)
        first = starts + rows + 1 + row
        begin, end = tl.load(first), tl.load(first + 1)
        for low in range(0, vocab, BLOCK):
            at = low + place
            there = at < vocab
            number = tl.load(own + at, mask=there, other=0)
            for guess in range(begin, end):  # as if it were right
                number += tl.where(at == tl.load(entries + 2 * guess), 2, 0)
            old = tl.load(base + at, mask=there, other=0.0)
            again = tl.where(old < 0, old * penalty, old / penalty)
            new = tl.where(number > 0, again, old)
            times = (number >> 1).to(tl.float32)
            less = (heat * (times / length) + flat).to(tl.float32)
            tl.store(base + at, tl.where(times > 0, new - less, new), mask=there)
        tl.debug_barrier()  # biases change the same scores
    first = starts + 2 * (rows + 1) + row
    begin, end = tl.load(first), tl.load(first + 1)
    for low in range(begin, end, BLOCK):
        there = low + place < end
        which = entries + 2 * (low + place)
        at = tl.load(which, mask=there, other=0)
        bias = tl.load(which + 1, mask=there, other=0).to(tl.float32, bitcast=True)
        old = tl.load(base + at, mask=there, other=0.0)
        tl.store(base + at, old + bias, mask=there)
    tl.debug_barrier()
    if tl.load(early + row) != 0:
        which = tl.arange(0, PADDED_EOS)
        at = tl.load(eos + which, mask=which < EOS, other=0)
        tl.store(base + at, float("-inf"), mask=which < EOS)
