"""N-gram embeddings (`states/ngrams_layer.py`): the rows of their table, their gates, and decodes
of the convolution over them.

Sums are float32. Results are rounded where torch's separate operations would round them. Offsets
are of 64 bits wherever tokens are involved.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_ngrams(
    found,  # int64 [R, (ORDER - 1) * HEADS], written
    tails,  # int64 [slots, ORDER - 1]: the tokens before, oldest first
    ids,  # int64 [R]
    reads,  # int64 [R]: slots of `tails`
    writes,  # likewise
    fresh,  # bool [R]: nothing is before
    factors,  # int64 [ORDER]: of a token, of the one before it, ...
    rows,  # int64 [ORDER - 1, HEADS]: of each head's part of the table
    firsts,  # int64 [ORDER - 1, HEADS]: the first of them
    end,  # the token that ends a text
    ORDER: tl.constexpr,
    HEADS: tl.constexpr,  # for n-grams of one size
    PADDED: tl.constexpr,  # the next power of two
):
    """Hash the n-grams that end in a row's token, and move the tokens before the next one."""
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    token, new = tl.load(ids + row), tl.load(fresh + row) != 0
    old, own = tails + tl.load(reads + row) * (ORDER - 1), tl.load(writes + row) * (ORDER - 1)
    hashed, ended = token * tl.load(factors), row < 0
    after = token
    for back in tl.static_range(ORDER - 1):
        before = tl.where(new, end, tl.load(old + ORDER - 2 - back))
        tl.debug_barrier()  # each place has been read, should both slots be the same
        tl.store(tails + own + ORDER - 2 - back, after)
        ended = ended | (before == end)
        hashed = hashed ^ (tl.where(ended, end, before) * tl.load(factors + back + 1))
        at, inside = back * HEADS + head, head < HEADS
        number = hashed % tl.load(rows + at, mask=inside, other=1)
        number += tl.load(firsts + at, mask=inside, other=0)
        tl.store(found + row * (ORDER - 1) * HEADS + at, number, mask=inside)
        after = before


@triton.jit
def gate_ngrams(
    gated,  # [T, COUNT, SIZE], written
    normed,  # likewise: its norm
    both,  # [T, (COUNT + 1) * SIZE], with `stride` between tokens: keys, then the value
    streams,  # [T, COUNT, SIZE]
    key_weight,  # float32 [COUNT, SIZE], as are the next
    query_weight,
    kernel_weight,
    key_eps,
    query_eps,
    kernel_eps,
    scale,  # of the products
    least,  # least size of a product whose root is taken
    stride,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two
    COUNT: tl.constexpr,
):
    """Gate the value of a token's n-grams for one hidden state, by its product with their key."""
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, PADDED)
    inside, own = place < SIZE, stream * SIZE + place
    at = token * COUNT * SIZE + own
    key = tl.load(both + token * stride + own, mask=inside, other=0.0)
    key = weigh_state(key, key_weight + own, key_eps, inside, SIZE)
    query = tl.load(streams + at, mask=inside, other=0.0)
    query = weigh_state(query, query_weight + own, query_eps, inside, SIZE)
    dtype = streams.dtype.element_ty
    product = (key.to(tl.float32) * query.to(tl.float32)).to(dtype).to(tl.float32)
    total = tl.sum(product, 0).to(dtype).to(tl.float32)
    total = (total / scale).to(dtype).to(tl.float32)
    root = tl.sqrt_rn(tl.maximum(tl.abs(total), least)).to(dtype).to(tl.float32)
    root = tl.where(total > 0, root, tl.where(total < 0, -root, 0.0))
    gate = tl.sigmoid(root).to(dtype).to(tl.float32)
    value = tl.load(both + token * stride + COUNT * SIZE + place, mask=inside, other=0.0)
    x = (gate * value.to(tl.float32)).to(dtype)
    tl.store(gated + at, x, mask=inside)
    tl.store(normed + at, weigh_state(x, kernel_weight + own, kernel_eps, inside, SIZE), inside)


@triton.jit
def weigh_state(x, weight, eps, inside, SIZE: tl.constexpr):
    """Return a hidden state normalised (RMS), in its own dtype."""
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    return (wide * tl.load(weight, mask=inside, other=0.0)).to(x.dtype)


@triton.jit
def spread_ngrams(
    out,  # [R, CHANNELS], written
    streams,  # [R, CHANNELS]
    gated,  # [R, CHANNELS]
    normed,  # [R, CHANNELS]: the convolution's new inputs
    tails,  # [slots, BEFORE, CHANNELS]: its earlier ones, oldest first
    kernel,  # [TAPS, CHANNELS]: that of the token itself is last
    reads,  # int64 [R]: slots of `tails`
    writes,  # likewise
    fresh,  # bool [R]: nothing is before
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of a program
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
):
    """Add a decode's n-grams, and SiLU of their convolution, to its hidden states."""
    BEFORE: tl.constexpr = (TAPS - 1) * DILATION
    dtype = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = channel < CHANNELS, row * CHANNELS + channel
    earlier = inside & (tl.load(fresh + row) == 0)
    old = tails + tl.load(reads + row) * BEFORE * CHANNELS + channel
    new = tails + tl.load(writes + row) * BEFORE * CHANNELS + channel
    x = tl.load(normed + at, mask=inside, other=0.0)
    weight = tl.load(kernel + (TAPS - 1) * CHANNELS + channel, mask=inside, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(BEFORE):
        before = tl.load(old + place * CHANNELS, mask=earlier, other=0.0).to(dtype)
        if place % DILATION == 0:
            own = tl.load(kernel + place // DILATION * CHANNELS + channel, mask=inside, other=0.0)
            total += (before.to(tl.float32) * own.to(tl.float32)).to(dtype).to(tl.float32)
        if place > 0:  # the place before it has been read, should both slots be the same
            tl.store(new + (place - 1) * CHANNELS, before, mask=inside)
    tl.store(new + (BEFORE - 1) * CHANNELS, x, mask=inside)
    total += (x.to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)
    spread = total.to(dtype).to(tl.float32)
    spread = (spread * tl.sigmoid(spread)).to(dtype).to(tl.float32)
    more = tl.load(gated + at, mask=inside, other=0.0).to(tl.float32)
    more = (more + spread).to(dtype).to(tl.float32)
    state = tl.load(streams + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (state + more).to(dtype), mask=inside)
