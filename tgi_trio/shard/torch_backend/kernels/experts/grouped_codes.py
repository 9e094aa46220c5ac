"""Products of groups of rows, each group with its own matrix, which stays quantised.

Groups are found as in `grouped.py`, and codes are dequantised as in `codes.py`. The matrices of all
groups are stacked as one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.experts.grouped import find_group, open_gates
from tgi_trio.shard.torch_backend.kernels.linears.codes import add_units


@triton.jit(do_not_specialize=["tokens", "one"])
def multiply_coded_groups(
    out,  # [pairs, N]
    x,  # [tokens, inputs]; without GATHERS [pairs, inputs], sorted by group
    codes,  # as for `multiply_codes`, with GROUPS * N outputs; with ACT twice as many
    planes,
    scales,
    bases,
    lows,
    low_bases,
    table,
    order,
    bias,  # of all outputs, read with HAS_BIAS only
    pairs,  # int32 [GROUPS, tokens], as written by `route_tokens`
    counts,  # int32 [GROUPS]
    tokens,
    limit,
    inputs,
    units,
    one,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,  # the next power of two
    PER_ROW: tl.constexpr,  # groups that each row is in
    GATHERS: tl.constexpr,  # as for `multiply_groups`
    HAS_BIAS: tl.constexpr,
    ACT: tl.constexpr,
    LIMITS: tl.constexpr,
    RAISED: tl.constexpr,
    PAIRED: tl.constexpr,
    BITS: tl.constexpr,  # as for `multiply_codes`
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    LOWS: tl.constexpr,
    ZERO: tl.constexpr,
    NESTED: tl.constexpr,
    ORDERED: tl.constexpr,
    NATIVE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    EVEN: tl.constexpr,
):
    own, begin, first, count = find_group(tl.program_id(0), counts, GROUPS, PADDED_GROUPS, ROWS)
    if own < GROUPS:
        within = first + tl.arange(0, ROWS)
        real = within < count
        pair = tl.load(pairs + own.to(tl.int64) * tokens + within, mask=real, other=0)
        row = (pair // PER_ROW if GATHERS else begin + within).to(tl.int64)
        target = (begin + within if GATHERS else pair).to(tl.int64)
        source = x + tl.where(real, row, 0) * inputs
        column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        each: tl.constexpr = 2 * N if ACT != "" else N
        # Results beyond the last output are not stored.
        there = own * each + tl.minimum(column, N - 1)[:, None] * (2 if PAIRED else 1)
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        total = add_units(
            total, codes, planes, 0, units, units, there, source, inputs, scales, bases, lows,
            low_bases, table, order, one, BITS, NUMBERS, GROUP, LOWS, ZERO, NESTED, ORDERED, NATIVE,
            UNITS, EVEN,
        )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias + there).to(tl.float32)
        if ACT != "":
            there += 1 if PAIRED else N
            up = tl.zeros([OUTPUTS, ROWS], tl.float32)
            up = add_units(
                up, codes, planes, 0, units, units, there, source, inputs, scales, bases, lows,
                low_bases, table, order, one, BITS, NUMBERS, GROUP, LOWS, ZERO, NESTED, ORDERED,
                NATIVE, UNITS, EVEN,
            )  # fmt: skip
            if HAS_BIAS:
                up += tl.load(bias + there).to(tl.float32)
            total = open_gates(total, up, limit, out, ACT, LIMITS, RAISED)
        at = target[None, :] * N + column[:, None]
        stored = (column < N)[:, None] & real[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=stored)
