"""LoRA adapters of the matrix that expands latents, around the products that it is absorbed in.

With A of all heads, and B_k and B_v of each, queries get A^T (B_k^T q), and values B_v (A c); see
`layers/adapters/adapted_latents.py`. Tiles, slots and their directory are those of
`kernels/adapters/linear_adapters.py`. B has rows for the keys of a head and then for its values,
head by head.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ENTRY = tl.constexpr(5)  # numbers of a directory entry
_UNIT = tl.constexpr(16)  # numbers in a unit of the offsets


@triton.jit(do_not_specialize=["first"])
def adapt_heads(
    out,  # [tokens, heads, OUTPUTS], contiguous: added to, in place
    x,  # [tokens, heads, INPUTS]; the numbers of a head are contiguous
    numbers,  # [slots, capacity]
    directory,  # int32 [slots, entries, 5]
    tiles,  # int32 [programs, 3]: slot, first token, tokens; no tokens: nothing to do
    row_stride,  # of x
    head_stride,
    capacity,
    entries,
    first,  # directory entry of the matrix
    KEYS: tl.constexpr,  # x has queries, else latents that have been attended to
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PLAIN: tl.constexpr,  # rows of B for a head's keys
    EACH: tl.constexpr,  # for a head's keys and values
    RANKS: tl.constexpr,  # the largest, rounded up to a power of two
    ROWS: tl.constexpr,  # of a program; a tile has several programs
    DEPTH: tl.constexpr,  # inputs of one step of the loop
    COLUMNS: tl.constexpr,  # outputs of one step of the loop
):
    """Change what some rows of a tile have of a head; both products are computed by one program."""
    count = tl.load(tiles + 3 * tl.program_id(0) + 2) - tl.program_id(2) * ROWS
    slot = tl.load(tiles + 3 * tl.program_id(0)).to(tl.int64)
    entry = directory + (slot * entries + first) * _ENTRY
    ranks = tl.multiple_of(tl.load(entry + 1), _UNIT)
    if (count > 0) & (ranks > 0):
        head = tl.program_id(1)
        a = numbers + slot * capacity + tl.load(entry + 2).to(tl.int64) * _UNIT
        b = numbers + slot * capacity + tl.load(entry + 3).to(tl.int64) * _UNIT
        b += (head * EACH + (0 if KEYS else PLAIN)) * ranks
        place = tl.arange(0, ROWS)
        real = place < count
        begin = tl.load(tiles + 3 * tl.program_id(0) + 1) + tl.program_id(2) * ROWS
        row = tl.where(real, begin + place, begin).to(tl.int64)
        rank = tl.arange(0, RANKS)
        known = rank < ranks
        low = tl.zeros([ROWS, RANKS], tl.float32)
        for k in range(0, INPUTS, DEPTH):
            depth = k + tl.arange(0, DEPTH)
            inside = depth < INPUTS
            v = tl.load(
                x + row[:, None] * row_stride + head * head_stride + depth[None, :],
                mask=real[:, None] & inside[None, :],
                other=0.0,
            )
            if KEYS:
                where = b + depth[:, None] * ranks + rank[None, :]
            else:
                where = a + rank[None, :] * INPUTS + depth[:, None]
            w = tl.load(where, mask=inside[:, None] & known[None, :], other=0.0)
            low = tl.dot(v, w, low, input_precision="ieee")
        rounded = low.to(numbers.dtype.element_ty)
        target = out + (row * tl.num_programs(1) + head) * OUTPUTS
        for k in range(0, OUTPUTS, COLUMNS):
            column = k + tl.arange(0, COLUMNS)
            inside = column < OUTPUTS
            if KEYS:
                where = a + rank[:, None] * OUTPUTS + column[None, :]
            else:
                where = b + column[None, :] * ranks + rank[:, None]
            w = tl.load(where, mask=known[:, None] & inside[None, :], other=0.0)
            total = tl.dot(rounded, w, input_precision="ieee")
            stored = real[:, None] & inside[None, :]
            y = tl.load(target[:, None] + column[None, :], mask=stored, other=0.0)
            y = y.to(tl.float32) + total
            tl.store(target[:, None] + column[None, :], y.to(out.dtype.element_ty), mask=stored)
