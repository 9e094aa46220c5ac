"""Recurrences token by token, where batch invariance is kept: one program code for any rows.

Chunks of a scan begin where a step does, so a chunked scan adds up in an order that follows the
step. Here a program goes through a row's tokens one after another with a part of a state in
registers, float32, and does for each what decodes do. Decodes launch the same program, compiled
once: whether a row is listed is an argument and no constant, so that no compiler fuses a product
and a sum for one token otherwise than for many. No program shares a sum with another.

Offsets are of 64 bits wherever rows, tokens or slots are involved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.states.delta_rule import fade_log, unit
from tgi_trio.shard.torch_backend.kernels.states.mamba2 import bound, open_gate
from tgi_trio.shard.torch_backend.kernels.states.recurrence import soften
from tgi_trio.shard.torch_backend.kernels.states.recurrent_gate import (
    multiply_branches,
    scale_input,
)

# fmt: off


@triton.jit
def find_row(starts, reads, writes, listed):
    """Return a program's row: its first token, its end, the slots it reads and writes.

    Last: whether there is anything to do. A recording's row that a step does not have has no
    tokens, and moves its state to where it is.
    """
    row = tl.program_id(0).to(tl.int64)
    first, end = row, row + 1
    if listed:
        first, end = tl.load(starts + row), tl.load(starts + row + 1)
    read, write = tl.load(reads + row), tl.load(writes + row)
    return row, first, end, read, write, (first < end) | (read != write)


@triton.jit(do_not_specialize=["listed"])
def walk_delta_rule(
    mixed,  # float32 [T, ...]: queries, keys [KEY_HEADS, KEY] and values [HEADS, VALUE]; values are
    #         overwritten by what is read
    beta,  # [T, HEADS], with a stride between tokens, as has the next
    decay,  # [T, HEADS], with BY_CHANNEL [T, HEADS, KEY]
    rate,  # float32 [HEADS]
    decay_bias,  # float32, as many as decays of a token
    states,  # float32 [slots, HEADS, KEY, VALUE]
    starts,  # int64 [R + 1]: the rows' first tokens, cumulative; read if `listed`
    reads,  # int64 [R]: slots of `states`
    writes,  # likewise
    fresh,  # bool [R]: the state before is zero
    listed,  # 0: every row is one token
    scale,  # of queries
    beta_scale,
    least_decay,  # with BOUNDED
    beta_stride, decay_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of values of a program
    TILED: tl.constexpr,  # value heads of a key head are KEY_HEADS apart
    BY_CHANNEL: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Take a part of a head's state through the tokens of a row, and read it behind each."""
    row, first, end, read, write, moves = find_row(starts, reads, writes, listed)
    if not moves:
        return
    head = tl.program_id(1)
    key_head = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
    k, v = tl.arange(0, PADDED_KEY), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    there, inside = k < KEY, v < VALUE
    known = there[:, None] & inside[None, :]
    at = (head * KEY + k[:, None]) * VALUE + v[None, :]
    held = known & (tl.load(fresh + row) == 0)
    state = tl.load(states + read * HEADS * KEY * VALUE + at, mask=held, other=0.0)
    speed = tl.load(rate + head)
    each = head * KEY + k if BY_CHANNEL else head + k * 0
    bias = tl.load(decay_bias + each, mask=there, other=0.0)
    for token in range(first, end):
        own = mixed + token * (2 * KEY_HEADS * KEY + HEADS * VALUE)
        query = unit(tl.load(own + key_head * KEY + k, mask=there, other=0.0)) * scale
        key = unit(tl.load(own + (KEY_HEADS + key_head) * KEY + k, mask=there, other=0.0))
        place = own + 2 * KEY_HEADS * KEY + head * VALUE + v
        value = tl.load(place, mask=inside, other=0.0)
        x = tl.load(decay + token * decay_stride + each, mask=there, other=0.0).to(tl.float32)
        fading = tl.exp(fade_log(x + bias, speed, least_decay, BOUNDED))
        strength = tl.load(beta + token * beta_stride + head).to(tl.float32)
        strength = tl.sigmoid(strength) * beta_scale
        state = state * fading[:, None]
        update = strength * (value - tl.sum(key[:, None] * state, 0))
        state += key[:, None] * update[None, :]
        found = tl.sum(query[:, None] * state, 0)
        tl.debug_barrier()  # all threads have read what is overwritten
        tl.store(place, found, mask=inside)
    tl.store(states + write * HEADS * KEY * VALUE + at, state, mask=known)


@triton.jit(do_not_specialize=["listed"])
def walk_mamba2(
    out,  # [T, HEADS, DIM], written
    mixed,  # [T, ...]: x [HEADS, DIM], then b and c [GROUPS, STATE] each
    gate,  # [T, HEADS, DIM], with GATED, and with a stride between tokens, as has the next
    dt,  # [T, HEADS]: time steps before their bias and softplus
    rate,  # float32 [HEADS], negative
    dt_bias,  # float32 [HEADS]
    skip,  # float32 [HEADS]
    states,  # float32 [slots, HEADS, DIM, STATE]
    starts,  # these and the next are as for `walk_delta_rule`
    reads, writes, fresh, listed,
    gate_stride, dt_stride,
    gate_factor, dt_factor,  # of `gate` and `dt`
    least, most,  # bounds of time steps
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_STATE: tl.constexpr,
    BLOCK: tl.constexpr,  # numbers of a head that a program computes
    GATED: tl.constexpr,  # what is read is multiplied by SiLU of the gate
):
    """Take a part of a head's state through the tokens of a row, and read it behind each."""
    row, first, end, read, write, moves = find_row(starts, reads, writes, listed)
    if not moves:
        return
    head = tl.program_id(1)
    p, n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED_STATE)
    inside, known = p < DIM, n < STATE
    there = inside[:, None] & known[None, :]
    at = (head * DIM + p[:, None]) * STATE + n[None, :]
    held = there & (tl.load(fresh + row) == 0)
    state = tl.load(states + read * HEADS * DIM * STATE + at, mask=held, other=0.0)
    fading, bias = tl.load(rate + head), tl.load(dt_bias + head)
    skipped = tl.load(skip + head)
    for token in range(first, end):
        own = mixed + token * (HEADS * DIM + 2 * GROUPS * STATE)
        shared = own + HEADS * DIM + head // (HEADS // GROUPS) * STATE + n
        x = tl.load(own + head * DIM + p, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(shared, mask=known, other=0.0).to(tl.float32)
        c = tl.load(shared + GROUPS * STATE, mask=known, other=0.0).to(tl.float32)
        step = tl.load(dt + token * dt_stride + head).to(tl.float32)
        step = bound(soften(step * dt_factor + bias), least, most)
        state = state * tl.exp(step * fading) + (x * step)[:, None] * b[None, :]
        found = tl.sum(state * c[None, :], 1) + x * skipped
        if GATED:
            beside = gate + token * gate_stride + head * DIM + p
            found *= open_gate(tl.load(beside, mask=inside, other=0.0), gate_factor)
        target = out + (token * HEADS + head) * DIM + p
        tl.store(target, found.to(out.dtype.element_ty), mask=inside)
    tl.store(states + write * HEADS * DIM * STATE + at, state, mask=there)


@triton.jit(do_not_specialize=["listed"])
def walk_mamba1(
    out,  # [T, CHANNELS], written
    mixed,  # [T, CHANNELS]: x
    gate,  # [T, CHANNELS], with a stride between tokens, as have the next two
    dt,  # [T, CHANNELS]: time steps before their bias and softplus
    selected,  # [T, 2 * STATE]: b and c
    rate,  # float32 [STATE, CHANNELS], negative
    dt_bias,  # float32 [CHANNELS]
    skip,  # float32 [CHANNELS]
    states,  # float32 [slots, STATE, CHANNELS]
    starts,  # these and the next are as for `walk_delta_rule`
    reads, writes, fresh, listed,
    gate_stride, dt_stride, selected_stride,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_STATE: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of a program
):
    """Take the states of some channels through the tokens of a row; what is read is gated."""
    row, first, end, read, write, moves = find_row(starts, reads, writes, listed)
    if not moves:
        return
    channel, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED_STATE)
    inside, known = channel < CHANNELS, n < STATE
    there = known[:, None] & inside[None, :]
    at = n[:, None] * CHANNELS + channel[None, :]
    speed = tl.load(rate + at, mask=there, other=0.0)
    bias = tl.load(dt_bias + channel, mask=inside, other=0.0)
    skipped = tl.load(skip + channel, mask=inside, other=0.0)
    held = there & (tl.load(fresh + row) == 0)
    state = tl.load(states + read * STATE * CHANNELS + at, mask=held, other=0.0)
    for token in range(first, end):
        x = tl.load(mixed + token * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
        step = tl.load(dt + token * dt_stride + channel, mask=inside, other=0.0).to(tl.float32)
        step = soften(step + bias)
        shared = selected + token * selected_stride + n
        b = tl.load(shared, mask=known, other=0.0).to(tl.float32)
        c = tl.load(shared + STATE, mask=known, other=0.0).to(tl.float32)
        state = state * tl.exp(step[None, :] * speed) + (x * step)[None, :] * b[:, None]
        found = tl.sum(state * c[:, None], 0) + x * skipped
        beside = tl.load(gate + token * gate_stride + channel, mask=inside, other=0.0)
        found *= open_gate(beside, 1.0)
        tl.store(out + token * CHANNELS + channel, found.to(out.dtype.element_ty), mask=inside)
    tl.store(states + write * STATE * CHANNELS + at, state, mask=there)


@triton.jit(do_not_specialize=["listed"])
def walk_gated(
    out,  # [T, CHANNELS], written
    entered,  # float32 [T, CHANNELS]: as `open_gates` writes them
    logarithms,  # likewise
    beside,  # [T, CHANNELS], with `stride` between tokens: the other branch
    states,  # float32 [slots, CHANNELS]
    starts,  # these and the next are as for `walk_delta_rule`
    reads, writes, fresh, listed,
    stride,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of a program
    ACT: tl.constexpr,  # of the other branch
):
    """Take the states of some channels through the tokens of a row, times the other branch."""
    row, first, end, read, write, moves = find_row(starts, reads, writes, listed)
    if not moves:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    begins = tl.load(fresh + row) != 0
    held = inside & (begins == 0)
    state = tl.load(states + read * CHANNELS + channel, mask=held, other=0.0)
    for token in range(first, end):
        at = token * CHANNELS + channel
        logarithm = tl.load(logarithms + at, mask=inside, other=0.0)
        value = tl.load(entered + at, mask=inside, other=0.0)
        value = scale_input(value, logarithm, begins & (token == first))
        state = value + tl.exp(logarithm) * state
        other = tl.load(beside + token * stride + channel, mask=inside, other=0.0)
        tl.store(out + at, multiply_branches(state, other, ACT, out.dtype.element_ty), mask=inside)
    tl.store(states + write * CHANNELS + channel, state, mask=inside)
# fmt: on
