"""Decodes of linear attention by the gated delta rule (`states/delta_rule_layer.py`).

States and sums are float32. Results are rounded where torch's separate operations would round
them. Offsets are of 64 bits wherever rows or slots are involved.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def step_delta_rule(
    out,  # [T, HEADS, VALUE], written
    mixed,  # float32 [T, ...]: queries, keys [KEY_HEADS, KEY] and values [HEADS, VALUE]
    gate,  # [T, HEADS, VALUE], with a stride between tokens, as have the next two
    beta,  # [T, HEADS]
    decay,  # [T, HEADS], with BY_CHANNEL [T, HEADS, KEY]
    rate,  # float32 [HEADS]
    decay_bias,  # float32, as many as decays of a token
    norm,  # float32 [VALUE]
    states,  # float32 [slots, HEADS, KEY, VALUE]
    reads,  # int64 [R]: slots of `states`
    writes,  # likewise
    fresh,  # bool [R]: the state before is zero
    rows,  # int64: with LISTED those of the programs, of which rows of one token are moved
    starts,  # int64 [R + 1]: the rows' first tokens, cumulative; with LISTED
    scale,  # of queries
    eps, beta_scale,
    least_decay,  # with BOUNDED
    gate_stride, beta_stride, decay_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    TILED: tl.constexpr,  # value heads of a key head are KEY_HEADS apart
    BY_CHANNEL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SILU: tl.constexpr,  # of gates; otherwise sigmoid
    LISTED: tl.constexpr,  # otherwise every row is one token
):
    """Move the state of one head of a row by its token, and compute what is read of it.

    That is normalised (RMS) and gated.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = row
    if LISTED:
        row = tl.load(rows + row)
        token = tl.load(starts + row)
        if tl.load(starts + row + 1) - token != 1:
            return
    key_head = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
    k, v = tl.arange(0, PADDED_KEY), tl.arange(0, PADDED_VALUE)
    there, inside = k < KEY, v < VALUE
    own = mixed + token * (2 * KEY_HEADS * KEY + HEADS * VALUE)
    query = unit(tl.load(own + key_head * KEY + k, mask=there, other=0.0)) * scale
    key = unit(tl.load(own + (KEY_HEADS + key_head) * KEY + k, mask=there, other=0.0))
    value = tl.load(own + 2 * KEY_HEADS * KEY + head * VALUE + v, mask=inside, other=0.0)
    each = head * KEY + k if BY_CHANNEL else head + k * 0
    x = tl.load(decay + token * decay_stride + each, mask=there, other=0.0).to(tl.float32)
    x += tl.load(decay_bias + each, mask=there, other=0.0)
    fading = tl.exp(fade_log(x, tl.load(rate + head), least_decay, BOUNDED))
    strength = tl.sigmoid(tl.load(beta + token * beta_stride + head).to(tl.float32)) * beta_scale
    at = (head * KEY + k[:, None]) * VALUE + v[None, :]
    known = there[:, None] & inside[None, :]
    held = known & (tl.load(fresh + row) == 0)
    before = states + tl.load(reads + row) * HEADS * KEY * VALUE
    state = tl.load(before + at, mask=held, other=0.0) * fading[:, None]
    update = strength * (value - tl.sum(key[:, None] * state, 0))
    state += key[:, None] * update[None, :]
    after = states + tl.load(writes + row) * HEADS * KEY * VALUE
    tl.store(after + at, state, mask=known)
    read = tl.sum(query[:, None] * state, 0)
    read = read * tl.rsqrt(tl.sum(read * read, 0) / VALUE + eps)
    read = read * tl.load(norm + v, mask=inside, other=0.0)
    place = head * VALUE + v
    opened = tl.load(gate + token * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    opened = opened * tl.sigmoid(opened) if SILU else tl.sigmoid(opened)
    result = (read * opened).to(out.dtype.element_ty)
    tl.store(out + token * HEADS * VALUE + place, result, mask=inside)
# fmt: on


@triton.jit
def fade_log(x, speed, least_decay, BOUNDED: tl.constexpr):
    """Return the logarithm of what is left of a state, for decays `x` before their activation."""
    if BOUNDED:
        return least_decay * tl.sigmoid(speed * x)
    else:  # the softplus of a large number is the number
        return -speed * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def unit(x):
    """Return a vector of length one; one near zero stays near zero."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)
