"""Scores of an index and, in the same launch, queries over latents: neither waits for the other.

These are the products of a head's queries with the matrix by which keys would be expanded. Programs
that score come first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.attention.index_scores import score_some


# fmt: off
@triton.jit(do_not_specialize=["first", "count", "stride", "parts", "tokens"])
def score_and_absorb(
    scores, visible, queries, weights, cos, sin, factor, bias, logs, keys,  # as for `score_units`
    tables, width, contexts, query_starts, rows, first, count, stride, query_token_stride,
    query_head_stride, weight_stride, key_stride,
    absorbed,  # [T, ABSORBED_HEADS, RANK], contiguous, written
    plain,  # [T, ABSORBED_HEADS, PLAIN], of any strides but the last
    matrix,  # [ABSORBED_HEADS, PLAIN, RANK], contiguous
    tokens, plain_token_stride, plain_head_stride,
    parts,  # programs that score a tile, the first ones of the grid's second dimension
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    UNIT: tl.constexpr, MOST: tl.constexpr, WEIGHTED: tl.constexpr, SCALES: tl.constexpr,
    ROTARY: tl.constexpr, BEGIN: tl.constexpr, IN_HALVES: tl.constexpr, PADDED_HALF: tl.constexpr,
    REST: tl.constexpr, PADDED_REST: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, CODES: tl.constexpr,
    ABSORBED_HEADS: tl.constexpr, PLAIN: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,  # of a product; powers of two, as is
    DEPTH: tl.constexpr,  # the numbers of queries that are multiplied at a time
):
    """Do what `score_units` does, and multiply each head of `plain` by its matrix."""
    if tl.program_id(1) < parts:  # which is in no register of its own
        score_some(
            tl.program_id(0), tl.program_id(1), parts, scores, visible, queries, weights, cos, sin,
            factor, bias, logs, keys, tables, width, contexts, query_starts, rows, first, count,
            stride, query_token_stride, query_head_stride, weight_stride, key_stride, HEADS,
            PADDED_HEADS, DIM, PADDED_DIM, UNIT, MOST, WEIGHTED, SCALES, ROTARY, BEGIN, IN_HALVES,
            PADDED_HALF, REST, PADDED_REST, TOKENS, KEYS, PAGE, CODES,
        )
    else:
        absorb_some(
            (tl.program_id(1) - parts) * tl.num_programs(0) + tl.program_id(0), absorbed, plain,
            matrix, tokens, plain_token_stride, plain_head_stride, ABSORBED_HEADS, PLAIN, RANK,
            ROWS, OUTPUTS, DEPTH,
        )


@triton.jit
def absorb_some(
    which,  # head, piece of its outputs and tile of tokens; the others as for `score_and_absorb`
    absorbed, plain, matrix, tokens, token_stride, head_stride,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):
    """Multiply some tokens of one head by a piece of its matrix, if there are such."""
    pieces: tl.constexpr = (RANK + OUTPUTS - 1) // OUTPUTS
    head, piece, tile = which % HEADS, which // HEADS % pieces, which // (HEADS * pieces)
    token = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    output = piece * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    at, row = plain + token * token_stride + head * head_stride, matrix + head * (PLAIN * RANK)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for low in range(0, PLAIN, DEPTH):
        number = low + tl.arange(0, DEPTH)
        left, down = number[None, :], number[:, None]
        x = tl.load(at + left, (token < tokens) & (left < PLAIN), other=0.0)
        w = tl.load(row + down * RANK + output, (output < RANK) & (down < PLAIN), other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    into = absorbed + (token * HEADS + head) * RANK + output
    tl.store(into, total.to(absorbed.dtype.element_ty), (token < tokens) & (output < RANK))
# fmt: on
