"""Causal convolutions over rows of any lengths (`states/convolution.py`), which keep their last
inputs.

Sums are float32. Products and results are rounded where torch's separate operations for decodes
would round them. Offsets are of 64 bits wherever tokens or slots are involved.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit(do_not_specialize=["rows", "tokens"])
def convolve(
    out,  # [T, CHANNELS], written
    inner,  # [T, CHANNELS], with `stride` between tokens, as have the next two: the inputs
    in_gates,  # [T, CHANNELS], with GATED: factors of inputs
    out_gates,  # [T, CHANNELS], with GATED: factors of results
    tails,  # [slots, (TAPS - 1) * DILATION, CHANNELS]: those before a row's first, oldest first
    kernel,  # [TAPS, CHANNELS]: that of the token itself is last
    bias,  # [CHANNELS], with BIASED
    starts,  # int64 [rows + 1]: the rows' first tokens, cumulative; not read with DECODES
    places,  # int32 [T]: of tokens in their rows, -1: in none; likewise
    reads,  # int64 [rows]: slots of `tails`
    writes,  # likewise
    fresh,  # bool [rows]: nothing is before
    rows, tokens, stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,  # channels of a program
    TILE: tl.constexpr,  # tokens of a program
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    BIASED: tl.constexpr,  # there is a bias
    SILU: tl.constexpr,  # of results
    GATED: tl.constexpr,
    DECODES: tl.constexpr,  # every row is one token
):
    """Convolve the first tokens of a row and keep its last inputs, or convolve a tile of others.

    What lies in slots is read and written by the programs of a row alone, so that a row may write
    to the slot that it reads. Tokens of no row get zeros.
    """
    convolve_some(
        tl.program_id(0), tl.program_id(1), out, inner, in_gates, out_gates, tails, kernel, bias,
        starts, places, reads, writes, fresh, rows, tokens, stride, CHANNELS, WIDTH, TILE, TAPS,
        DILATION, BIASED, SILU, GATED, DECODES,
    )


@triton.jit
def convolve_some(
    which,  # a row or, behind all rows, a tile
    part,  # which of its channels; the others as for `convolve`
    out, inner, in_gates, out_gates, tails, kernel, bias, starts, places, reads, writes, fresh,
    rows, tokens, stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, TAPS: tl.constexpr,
    DILATION: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr,
    DECODES: tl.constexpr,
):
    """Do what a program of `convolve` does."""
    channel = part * WIDTH + tl.arange(0, WIDTH)
    if which < rows:
        convolve_beginning(
            which, out, inner, in_gates, out_gates, tails, kernel, bias, starts, reads, writes,
            fresh, stride, channel, CHANNELS, WIDTH, TAPS, DILATION, BIASED, SILU, GATED, DECODES,
        )
    else:
        convolve_tile(
            which - rows, out, inner, in_gates, out_gates, kernel, bias, places, tokens, stride,
            channel, CHANNELS, WIDTH, TILE, TAPS, DILATION, BIASED, SILU, GATED,
        )


@triton.jit
def convolve_beginning(
    row, out, inner, in_gates, out_gates, tails, kernel, bias, starts, reads, writes, fresh,
    stride, channel, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    DILATION: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr,
    DECODES: tl.constexpr,
):
    """Convolve the tokens of a row that read a slot, and keep the row's last inputs."""
    row = row.to(tl.int64)
    inside = channel < CHANNELS
    before: tl.constexpr = (TAPS - 1) * DILATION
    if DECODES:
        first, length = row, row * 0 + 1
    else:
        first = tl.load(starts + row)
        length = tl.load(starts + row + 1) - first
    dtype = inner.dtype.element_ty
    earlier = inside & (tl.load(fresh + row) == 0)
    place = first * stride + channel
    own, factors = inner + place, in_gates + place
    old = tails + tl.load(reads + row) * before * CHANNELS + channel
    for token in range(tl.minimum(length, max(before, 1))):
        total = tl.zeros([WIDTH], tl.float32)
        for k in tl.static_range(TAPS):
            at = token - (TAPS - 1 - k) * DILATION
            x = take_input(
                own, factors, old, at, stride, inside, earlier, before, CHANNELS, GATED
            )
            total += weigh_input(x, kernel + k * CHANNELS + channel, inside, dtype)
        behind = out_gates + place + token * stride
        result = finish(total, bias + channel, behind, inside, inside, dtype, BIASED, SILU, GATED)
        tl.store(out + (first + token) * CHANNELS + channel, result, mask=inside)
    new = tails + tl.load(writes + row) * before * CHANNELS + channel
    for k in tl.static_range(before):
        at = length - before + k
        x = take_input(own, factors, old, at, stride, inside, earlier, before, CHANNELS, GATED)
        tl.debug_barrier()  # this place has been read, should both slots be the same
        tl.store(new + k * CHANNELS, x, mask=inside)


@triton.jit
def convolve_tile(
    tile, out, inner, in_gates, out_gates, kernel, bias, places, tokens, stride, channel,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, TAPS: tl.constexpr,
    DILATION: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr,
):
    """Convolve tokens that read no slot."""
    token = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    channel, inside = channel[None, :], (channel < CHANNELS)[None, :]
    place = tl.load(places + token, mask=token < tokens, other=0)[:, None]
    mine = (place >= max((TAPS - 1) * DILATION, 1)) & inside
    dtype = inner.dtype.element_ty
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for k in tl.static_range(TAPS):
        at = token - (TAPS - 1 - k) * DILATION
        each = at[:, None] * stride + channel
        x = load_input(inner + each, in_gates + each, mine, GATED)
        total += weigh_input(x, kernel + k * CHANNELS + channel, inside, dtype)
    behind = out_gates + token[:, None] * stride + channel
    result = finish(total, bias + channel, behind, inside, mine, dtype, BIASED, SILU, GATED)
    written = mine | (place < 0) & inside
    tl.store(out + token[:, None] * CHANNELS + channel, tl.where(mine, result, 0.0), mask=written)
# fmt: on


@triton.jit
def take_input(
    own,
    factors,
    old,
    at,
    stride,
    inside,
    earlier,
    before: tl.constexpr,
    CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Return a row's input at a place, which is before its first token if it is negative."""
    x = load_input(own + at * stride, factors + at * stride, inside & (at >= 0), GATED)
    kept = tl.load(old + (before + at) * CHANNELS, mask=earlier & (at < 0), other=0.0)
    return tl.where(at >= 0, x, kept.to(x.dtype))


@triton.jit
def load_input(inner, in_gates, mask, GATED: tl.constexpr):
    """Return inputs, with GATED times their factors."""
    x = tl.load(inner, mask=mask, other=0.0)
    if GATED:
        factor = tl.load(in_gates, mask=mask, other=0.0)
        return (x.to(tl.float32) * factor.to(tl.float32)).to(x.dtype)
    else:
        return x


@triton.jit
def weigh_input(x, weight, inside, dtype: tl.constexpr):
    """Return an input times its weight, rounded."""
    weight = tl.load(weight, mask=inside, other=0.0)
    return (x.to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def finish(
    total,
    bias,
    out_gates,
    inside,
    mask,
    dtype: tl.constexpr,
    BIASED: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
):
    """Return a sum with its bias, activation and factor, rounded after each of them."""
    total = total.to(dtype).to(tl.float32)
    if BIASED:
        total += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
        total = total.to(dtype).to(tl.float32)
    if SILU:
        total = (total * tl.sigmoid(total)).to(dtype).to(tl.float32)
    if GATED:
        total *= tl.load(out_gates, mask=mask, other=0.0).to(tl.float32)
        total = total.to(dtype).to(tl.float32)
    return total
