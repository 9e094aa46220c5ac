"""LoRA adapters of experts: y += B (A x) for rows that have an expert and an adapter each.

A layer's (token, expert) pairs are listed by expert (`kernels/experts/routing.py`), and a tile has
pairs of one expert, whose tokens may have any adapters. A program goes through the adapters of its
tile's rows, nearly always one, and multiplies all rows with each of them; a row keeps the result of
its own. So the order of a row's sums depends on no other row. Slots and their directory are those
of `kernels/adapters/linear_adapters.py`; the entries of a linear's pieces are adjacent, expert by
expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.adapters.linear_adapters import add_product, multiply_low
from tgi_trio.shard.torch_backend.kernels.experts.grouped import find_group

_ENTRY = tl.constexpr(5)  # numbers of a directory entry
_UNIT = tl.constexpr(16)  # numbers in a unit of the offsets


@triton.jit(do_not_specialize=["tokens", "count"])
def spread_slots(
    slots,  # int32 [tokens]: written
    tiles,  # int32 [count, 3]: slot, first token, tokens
    tokens,
    count,
    BLOCK: tl.constexpr,
):
    """Write the slot of each token's adapter, -1 for none."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.full([BLOCK], -1, tl.int32)
    for i in range(count):
        first = tl.load(tiles + 3 * i + 1)
        inside = (token >= first) & (token < first + tl.load(tiles + 3 * i + 2))
        own = tl.where(inside, tl.load(tiles + 3 * i), own)
    tl.store(slots + token, own, mask=token < tokens)


@triton.jit(do_not_specialize=["tokens", "first"])
def shrink_members(
    low,  # float32 [parts, rows, PIECES, RANKS]: A x of rows sorted by expert
    x,  # as for `multiply_groups`
    numbers,  # [slots, capacity]
    directory,  # int32 [slots, entries, 5]
    slots,  # int32 [tokens], of `spread_slots`
    pairs,  # int32 [GROUPS, tokens]
    counts,  # int32 [GROUPS]
    tokens,
    inputs,
    capacity,
    entries,
    first,  # directory entry of the first expert's first piece
    EACH: tl.constexpr,  # experts of a token
    PER_ROW: tl.constexpr,  # as for `multiply_groups`, like the next one
    GATHERS: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    RANKS: tl.constexpr,  # the largest, a multiple of STEP
    ROWS: tl.constexpr,  # of a tile
    STEP: tl.constexpr,  # ranks of a program
    DEPTH: tl.constexpr,  # inputs of one step of the loop
):
    """Multiply a tile's rows by some ranks of their adapters' A, over a part of the inputs."""
    own, begin, start, count = find_group(tl.program_id(0), counts, GROUPS, PADDED_GROUPS, ROWS)
    if own < GROUPS:
        within = start + tl.arange(0, ROWS)
        real = within < count
        pair = tl.load(pairs + own.to(tl.int64) * tokens + within, mask=real, other=0)
        left = tl.load(slots + pair // EACH, mask=real, other=-1)
        source = (pair // PER_ROW if GATHERS else begin + within).to(tl.int64)
        piece = tl.program_id(1) // (RANKS // STEP)
        lowest = tl.program_id(1) % (RANKS // STEP) * STEP
        rank = lowest + tl.arange(0, STEP)
        each = tl.cdiv(tl.cdiv(inputs, DEPTH), tl.num_programs(2)) * DEPTH
        nearest = tl.program_id(2) * each
        row = tl.program_id(2).to(tl.int64) * tokens * EACH + begin + within
        slot = tl.max(left, 0)
        while slot >= 0:
            mine = left == slot
            entry = (
                directory + (slot.to(tl.int64) * entries + first + own * PIECES + piece) * _ENTRY
            )
            ranks = tl.load(entry + 1)
            if (tl.load(entry) == piece) & (lowest < ranks):
                matrix = numbers + slot.to(tl.int64) * capacity
                matrix += tl.load(entry + 2).to(tl.int64) * _UNIT
                end = tl.minimum(nearest + each, inputs)
                total = multiply_low(
                    x, matrix, source, mine, rank, ranks, inputs, nearest, end, ROWS, STEP, DEPTH
                )
                at = (row * PIECES + piece) * RANKS
                stored = mine[:, None] & (rank < ranks)[None, :]
                tl.store(low + at[:, None] + rank[None, :], total, mask=stored)
            left = tl.where(mine, -1, left)
            slot = tl.max(left, 0)


@triton.jit(do_not_specialize=["tokens", "first", "second"])
def expand_members(
    out,  # [rows, outputs], as `multiply_groups` writes it: added to, in place
    low,  # float32 [parts, rows, PIECES, RANKS], of `shrink_members`
    numbers,
    directory,
    slots,
    pairs,
    counts,
    tokens,
    outputs,
    capacity,
    entries,
    first,
    second,  # where the second piece's outputs begin; `outputs` if there is none
    PARTS: tl.constexpr,
    EACH: tl.constexpr,
    GATHERS: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,  # of a tile
    DEPTH: tl.constexpr,  # ranks of one step of the loop; divides RANKS
):
    """Multiply the results of `shrink_members` by B, and add them to a tile of outputs."""
    own, begin, start, count = find_group(tl.program_id(0), counts, GROUPS, PADDED_GROUPS, ROWS)
    if own < GROUPS:
        within = start + tl.arange(0, ROWS)
        real = within < count
        pair = tl.load(pairs + own.to(tl.int64) * tokens + within, mask=real, other=0)
        left = tl.load(slots + pair // EACH, mask=real, other=-1)
        target = (begin + within if GATHERS else pair).to(tl.int64)
        source = (begin + within).to(tl.int64)  # rows of `low`
        lowest = tl.program_id(1) * OUTPUTS
        column = lowest + tl.arange(0, OUTPUTS)
        slot = tl.max(left, 0)
        while slot >= 0:
            mine = left == slot
            total = tl.zeros([ROWS, OUTPUTS], tl.float32)
            for piece in tl.static_range(PIECES):
                begins = 0 if piece == 0 else second
                ends = second if piece + 1 < PIECES else outputs
                entry = directory
                entry += (slot.to(tl.int64) * entries + first + own * PIECES + piece) * _ENTRY
                ranks = tl.multiple_of(tl.load(entry + 1), _UNIT)
                if (lowest < ends) & (lowest + OUTPUTS > begins) & (ranks > 0):
                    block = tl.load(entry)
                    matrix = numbers + slot.to(tl.int64) * capacity
                    matrix += tl.load(entry + 3).to(tl.int64) * _UNIT
                    there = (column >= begins) & (column < ends)
                    total = add_product(
                        *(total, low, source, block, tokens * EACH, PARTS, matrix),
                        *(column - begins, mine, there, ranks, PIECES, RANKS, ROWS, DEPTH, True),
                    )
            where = out + target[:, None] * outputs + column[None, :]
            stored = mine[:, None] & (column < outputs)[None, :]
            y = tl.load(where, mask=stored, other=0.0).to(tl.float32) + total
            tl.store(where, y.to(out.dtype.element_ty), mask=stored)
            left = tl.where(mine, -1, left)
            slot = tl.max(left, 0)
