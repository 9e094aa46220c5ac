"""Heads between their projection and attention, and in the same launch what is beside them.

That reads what the same product has projected, and nobody needs it before attention ends: a
convolution (Falcon H1) or the end of a low-rank detour (Gemma 3n). Programs of heads come first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.attention.rotating import write_some_heads
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier
from tgi_trio.shard.torch_backend.kernels.states.convolving import convolve_some


# fmt: off
@triton.jit(do_not_specialize=["rows", "tokens", "first"])
def rotate_and_convolve(
    query, key, value, qkv, cos, sin, slots, gain, bias, query_scale,  # as for `rotate_and_write`
    eps, clip, value_factor, key_scale, value_scale, stride,
    out, inner, in_gates, out_gates, tails, kernel, channel_bias,  # as for `convolve`
    starts, places, reads, writes, fresh, rows, tokens, inner_stride,
    first,  # the program with which convolutions begin
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    PADDED_DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, CLIPS: tl.constexpr,
    NORM: tl.constexpr, NORM_LAST: tl.constexpr, HAS_BIAS: tl.constexpr,
    SCALES_QUERIES: tl.constexpr, KEYS_AS_VALUES: tl.constexpr, VALUE_NORM: tl.constexpr,
    CODES: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of a token's heads
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, TAPS: tl.constexpr,
    DILATION: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr,
    DECODES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Do what `rotate_and_write` and `convolve` do."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    program = tl.program_id(0)
    if program < first:
        write_some_heads(
            program // PROGRAMS, program % PROGRAMS, query, key, value, qkv, cos, sin, slots, gain,
            bias, query_scale, eps, clip, value_factor, key_scale, value_scale, stride, HEADS,
            KV_HEADS, DIM, VALUE, PADDED_DIM, ROTARY, INTERLEAVED, CLIPS, NORM, NORM_LAST, HAS_BIAS,
            SCALES_QUERIES, KEYS_AS_VALUES, VALUE_NORM, CODES, FIRST, BLOCK,
        )
    else:
        parts: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
        convolve_some(
            (program - first) // parts, (program - first) % parts, out, inner, in_gates, out_gates,
            tails, kernel, channel_bias, starts, places, reads, writes, fresh, rows, tokens,
            inner_stride, CHANNELS, WIDTH, TILE, TAPS, DILATION, BIASED, SILU, GATED, DECODES,
        )


@triton.jit(do_not_specialize=["tokens", "first"])
def rotate_and_expand(
    query, key, value, qkv, cos, sin, slots, gain, bias, query_scale,  # as for `rotate_and_write`
    eps, clip, value_factor, key_scale, value_scale, stride,
    out,  # [T, SIZE]
    low,  # [T, RANK], with `low_stride` between tokens
    weight,  # [SIZE, RANK]
    low_stride,
    tokens,
    first,  # the program with which products begin
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    PADDED_DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, CLIPS: tl.constexpr,
    NORM: tl.constexpr, NORM_LAST: tl.constexpr, HAS_BIAS: tl.constexpr,
    SCALES_QUERIES: tl.constexpr, KEYS_AS_VALUES: tl.constexpr, VALUE_NORM: tl.constexpr,
    CODES: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of a token's heads
    SIZE: tl.constexpr, RANK: tl.constexpr,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,  # of a program's product
    DEPTH: tl.constexpr,  # numbers of RANK that are multiplied at a time
    OVERLAPS: tl.constexpr,
):
    """Do what `rotate_and_write` does, and multiply `low` with a matrix."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    program = tl.program_id(0)
    if program < first:
        write_some_heads(
            program // PROGRAMS, program % PROGRAMS, query, key, value, qkv, cos, sin, slots, gain,
            bias, query_scale, eps, clip, value_factor, key_scale, value_scale, stride, HEADS,
            KV_HEADS, DIM, VALUE, PADDED_DIM, ROTARY, INTERLEAVED, CLIPS, NORM, NORM_LAST, HAS_BIAS,
            SCALES_QUERIES, KEYS_AS_VALUES, VALUE_NORM, CODES, FIRST, BLOCK,
        )
    else:
        parts: tl.constexpr = (SIZE + OUTPUTS - 1) // OUTPUTS
        expand_tile(
            (program - first) // parts, (program - first) % parts, out, low, weight, low_stride,
            tokens, SIZE, RANK, TOKENS, OUTPUTS, DEPTH,
        )


@triton.jit
def expand_tile(
    tile,  # of tokens
    part,  # which of their outputs; the others as for `rotate_and_expand`
    out, low, weight, stride, tokens,
    SIZE: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write a tile of the product of `low` with a matrix."""
    token = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    output = part * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for begin in range(0, RANK, DEPTH):
        number = begin + tl.arange(0, DEPTH)
        left, right = number[None, :], number[:, None]
        x = tl.load(low + token * stride + left, (token < tokens) & (left < RANK), other=0.0)
        w = tl.load(weight + output * RANK + right, (output < SIZE) & (right < RANK), other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    inside = (token < tokens) & (output < SIZE)
    tl.store(out + token * SIZE + output, total.to(out.dtype.element_ty), mask=inside)
# fmt: on
