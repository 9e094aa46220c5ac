"""How often tokens occur in each sequence: counts for penalties, kept on the device."""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


# Sizes are not specialised: a new one must not make Triton compile another variant.
@triton.jit(do_not_specialize=["vocab"])
def count_tokens(
    counts,  # int32 [slots, vocab]: twice the count; plus 1 if in a prompt that is not counted
    slots,  # int32 [R]
    moves,  # int32 [R]: 1: reset the counts first, 0: only add, -1: leave them
    starts,  # int32 [R + 1]: where a row's entries begin
    entries,  # int32 [N, 2]: token id and what is added; an id occurs once per row
    inputs,  # int32 [R]: row of `chosen` with the row's last token, -1: it is among the entries
    chosen,  # int64: tokens that the previous step chose
    vocab,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Update the counts of one row."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0)
    move = tl.load(moves + row)
    if move >= 0:
        base = counts + tl.load(slots + row).to(tl.int64) * vocab
        place = tl.arange(0, BLOCK)
        if move > 0:
            for low in range(0, vocab, BLOCK):
                zero = tl.zeros([BLOCK], tl.int32)
                tl.store(base + low + place, zero, mask=low + place < vocab)
        tl.debug_barrier()  # the same places are written again below
        begin, end = tl.load(starts + row), tl.load(starts + row + 1)
        for low in range(begin, end, BLOCK):
            there = low + place < end
            which = entries + 2 * (low + place)
            at = tl.load(which, mask=there, other=0)
            old = tl.load(base + at, mask=there, other=0)
            tl.store(base + at, old + tl.load(which + 1, mask=there, other=0), mask=there)
        tl.debug_barrier()
        before = tl.load(inputs + row)
        if before >= 0:
            last = base + tl.load(chosen + before)
            tl.store(last, tl.load(last) + 2)
