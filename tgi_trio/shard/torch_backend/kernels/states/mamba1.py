"""Mamba's selective scan (Gu, Dao 2023) over rows of any lengths, and the norms before it
(`states/mamba1_layer.py`).

A program has some channels of a row and goes through its tokens in chunks: what the tokens of a
chunk do to the state is put together pair by pair. States and sums are float32. Offsets are of 64
bits wherever rows, tokens or slots are involved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.states.recurrence import chain, soften

# fmt: off


@triton.jit
def scan_mamba1(
    out,  # [T, CHANNELS], written
    mixed,  # [T, CHANNELS]: x
    gate,  # [T, CHANNELS], with a stride between tokens, as have the next two
    dt,  # [T, CHANNELS]: time steps before their bias and softplus
    selected,  # [T, 2 * STATE]: b and c
    starts,  # int64 [R + 1]: the rows' first tokens; not read with DECODES
    rate,  # float32 [STATE, CHANNELS], negative
    dt_bias,  # float32 [CHANNELS]
    skip,  # float32 [CHANNELS]
    states,  # float32 [slots, STATE, CHANNELS]
    reads,  # int64 [R]: slots of `states`
    writes,  # likewise
    fresh,  # bool [R]: the state before is zero
    gate_stride, dt_stride, selected_stride,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_STATE: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of a program
    LENGTH: tl.constexpr,  # tokens of a chunk
    DECODES: tl.constexpr,  # every row is one token
):
    """Move the states of some channels by all tokens of a row; what each reads of them is gated."""
    row = tl.program_id(0)
    if DECODES:
        first, end = row, row + 1
    else:
        first, end = tl.load(starts + row), tl.load(starts + row + 1)
    channel, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED_STATE)
    place = tl.arange(0, LENGTH)
    inside, known = channel < CHANNELS, n < STATE
    at = n[:, None] * CHANNELS + channel[None, :]
    there = known[:, None] & inside[None, :]
    speed = tl.load(rate + at, mask=there, other=0.0)
    bias = tl.load(dt_bias + channel, mask=inside, other=0.0)
    skipped = tl.load(skip + channel, mask=inside, other=0.0)
    held = there & (tl.load(fresh + row) == 0) & (end > first)
    before = states + tl.load(reads + row) * STATE * CHANNELS
    state = tl.load(before + at, mask=held, other=0.0)
    for low in range(first, end, LENGTH):
        token = (low + place).to(tl.int64)
        live = token < end
        some = live[:, None] & inside[None, :]
        x = tl.load(mixed + token[:, None] * CHANNELS + channel[None, :], mask=some, other=0.0)
        x = x.to(tl.float32)
        step = tl.load(dt + token[:, None] * dt_stride + channel[None, :], mask=some, other=0.0)
        step = tl.where(some, soften(step.to(tl.float32) + bias[None, :]), 0.0)
        shared = selected + token[:, None] * selected_stride + n[None, :]
        b = tl.load(shared, mask=live[:, None] & known[None, :], other=0.0).to(tl.float32)
        c = tl.load(shared + STATE, mask=live[:, None] & known[None, :], other=0.0).to(tl.float32)
        decay = tl.exp(step[:, None, :] * speed[None, :, :])  # [LENGTH, STATE, BLOCK]
        entered = (x * step)[:, None, :] * b[:, :, None]
        if LENGTH > 1:
            decay, entered = tl.associative_scan((decay, entered), 0, chain)
        after = entered + decay * state[None, :, :]
        last = (place == LENGTH - 1)[:, None, None]
        state = tl.sum(tl.where(last, after, 0.0), 0)
        read = tl.sum(after * c[:, :, None], 1) + x * skipped[None, :]
        beside = gate + token[:, None] * gate_stride + channel[None, :]
        opened = tl.load(beside, mask=some, other=0.0).to(tl.float32)
        read = read * (opened * tl.sigmoid(opened))
        own = out + token[:, None] * CHANNELS + channel[None, :]
        tl.store(own, read.to(out.dtype.element_ty), mask=some)
    target = states + tl.load(writes + row) * STATE * CHANNELS
    tl.store(target + at, state, mask=there & (end > first))


@triton.jit
def normalise_selected(
    out,  # [T, RANK + 2 * STATE], written
    selected,  # likewise: low-rank time steps, b and c
    gains,  # [RANK + 2 * STATE], with HAS_GAINS
    eps,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_STATE: tl.constexpr,
    HAS_GAINS: tl.constexpr,
):
    """Normalise (RMS) the three parts of what a token selects, each for itself."""
    first = tl.program_id(0).to(tl.int64) * (RANK + 2 * STATE)
    normalise_part(out, selected, gains, first, 0, eps, RANK, PADDED_RANK, HAS_GAINS)
    normalise_part(out, selected, gains, first, RANK, eps, STATE, PADDED_STATE, HAS_GAINS)
    normalise_part(out, selected, gains, first, RANK + STATE, eps, STATE, PADDED_STATE, HAS_GAINS)


@triton.jit
def normalise_part(
    out, selected, gains, first, low, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, HAS_GAINS: tl.constexpr,
):
    """Normalise the SIZE numbers of a token from `first + low` on."""
    place = tl.arange(0, PADDED)
    inside = place < SIZE
    part = tl.load(selected + first + low + place, mask=inside, other=0.0).to(tl.float32)
    part *= tl.rsqrt(tl.sum(part * part, 0) / SIZE + eps)
    if HAS_GAINS:
        part *= tl.load(gains + low + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + first + low + place, part.to(out.dtype.element_ty), mask=inside)
# fmt: on
