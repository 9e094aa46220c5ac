"""The logarithms of sums of exponentials, each row's in one order whatever the other rows are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["size"])
def find_log_totals(
    totals,  # float32 [rows]
    logits,  # float32 [rows, size], with `stride` between rows
    size,
    stride,
    BLOCK: tl.constexpr,  # numbers that are read at a time
):
    """Compute log(sum(exp(logits))) of a row."""
    row = logits + tl.program_id(0).to(tl.int64) * stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for low in range(0, size, BLOCK):
        place = low + tl.arange(0, BLOCK)
        found = tl.load(row + place, mask=place < size, other=float("-inf"))
        higher = tl.maximum(best, found)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp(best - level) + tl.exp(found - level)
        best = higher
    most = tl.max(best, 0)
    level = tl.where(most == float("-inf"), 0.0, most)
    tl.store(totals + tl.program_id(0), level + tl.log(tl.sum(mass * tl.exp(best - level), 0)))
