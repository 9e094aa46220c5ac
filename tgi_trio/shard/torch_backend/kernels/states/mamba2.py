"""Mamba-2 (SSD; Dao, Gu 2024) over rows of any lengths, and the norm behind it
(`states/mamba2_layer.py`).

A prompt goes through chunks of its row: within a chunk the quadratic form, from chunk to chunk the
state, which stays in registers. States and sums are float32. Offsets are of 64 bits wherever rows,
tokens or slots are involved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.states.recurrence import soften

# fmt: off


@triton.jit
def step_mamba2(
    out,  # [R, HEADS, DIM], written
    mixed,  # [R, ...]: x [HEADS, DIM], then b and c [GROUPS, STATE] each
    gate,  # [R, HEADS, DIM], with GATED, and with a stride between rows, as has the next
    dt,  # [R, HEADS]: time steps before their bias and softplus
    rate,  # float32 [HEADS], negative
    dt_bias,  # float32 [HEADS]
    skip,  # float32 [HEADS]
    states,  # float32 [slots, HEADS, DIM, STATE]
    reads,  # int64 [R]: slots of `states`
    writes,  # likewise
    fresh,  # bool [R]: the state before is zero
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
    """Move a part of one head's state by its row's only token, and compute what is read of it."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED_STATE)
    own = mixed + row * (HEADS * DIM + 2 * GROUPS * STATE)
    shared = own + HEADS * DIM + head // (HEADS // GROUPS) * STATE
    inside, known = p < DIM, n < STATE
    x = tl.load(own + head * DIM + p, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(shared + n, mask=known, other=0.0).to(tl.float32)
    c = tl.load(shared + GROUPS * STATE + n, mask=known, other=0.0).to(tl.float32)
    step = tl.load(dt + row * dt_stride + head).to(tl.float32) * dt_factor
    step = bound(soften(step + tl.load(dt_bias + head)), least, most)
    at = (head * DIM + p[:, None]) * STATE + n[None, :]
    there = inside[:, None] & known[None, :]
    held = there & (tl.load(fresh + row) == 0)
    before = states + tl.load(reads + row) * HEADS * DIM * STATE
    state = tl.load(before + at, mask=held, other=0.0) * tl.exp(step * tl.load(rate + head))
    state += (x * step)[:, None] * b[None, :]
    after = states + tl.load(writes + row) * HEADS * DIM * STATE
    tl.store(after + at, state, mask=there)
    read = tl.sum(state * c[None, :], 1) + x * tl.load(skip + head)
    if GATED:
        beside = gate + row * gate_stride + head * DIM + p
        read *= open_gate(tl.load(beside, mask=inside, other=0.0), gate_factor)
    tl.store(out + (row * HEADS + head) * DIM + p, read.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scan_mamba2(
    out,  # as for `step_mamba2`, but of T tokens; so are the next three
    mixed,
    gate,
    dt,
    starts,  # int64 [R + 1]: the rows' first tokens
    rate, dt_bias, skip,  # these and the next are as for `step_mamba2`
    states, reads, writes, fresh,
    gate_stride, dt_stride,
    gate_factor, dt_factor,
    least, most,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_STATE: tl.constexpr,  # numbers of a state at a time
    GATED: tl.constexpr,
    LENGTH: tl.constexpr,  # tokens of a chunk
    PRECISION: tl.constexpr,  # of products
):
    """Move a part of one head's state by all tokens of a row, and compute what each reads of it."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    p, place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, LENGTH)
    inside = p < DIM
    width: tl.constexpr = HEADS * DIM + 2 * GROUPS * STATE
    shared = mixed + HEADS * DIM + head // (HEADS // GROUPS) * STATE
    fading, bias = tl.load(rate + head), tl.load(dt_bias + head)
    skipped = tl.load(skip + head)
    there = inside[None, :] & (end > first)
    held = there & (tl.load(fresh + row) == 0)
    blocks: tl.constexpr = PADDED_STATE // BLOCK_STATE
    before = states + tl.load(reads + row) * HEADS * DIM * STATE
    state = ()  # [BLOCK_STATE, BLOCK] each, as products would take more registers otherwise
    for block in tl.static_range(blocks):
        n = block * BLOCK_STATE + tl.arange(0, BLOCK_STATE)
        at = (head * DIM + p[None, :]) * STATE + n[:, None]
        state += (tl.load(before + at, mask=held & (n < STATE)[:, None], other=0.0),)
    past = place[:, None] >= place[None, :]
    for low in range(first, end, LENGTH):
        token = (low + place).to(tl.int64)
        live = token < end
        step = tl.load(dt + token * dt_stride + head, mask=live, other=0.0).to(tl.float32)
        step = tl.where(live, bound(soften(step * dt_factor + bias), least, most), 0.0)
        likeness = tl.zeros([LENGTH, LENGTH], tl.float32)
        read = tl.zeros([LENGTH, BLOCK], tl.float32)
        for block in tl.static_range(blocks):
            n = block * BLOCK_STATE + tl.arange(0, BLOCK_STATE)
            b, c = load_selected(shared, token, live, n, width, GROUPS, STATE)
            # Products of half precision are exact.
            likeness = tl.dot(c, tl.trans(b), likeness, input_precision=PRECISION)
            c = c.to(tl.float32)
            read = tl.dot(c, state[block], read, input_precision=PRECISION)
        some = live[:, None] & inside[None, :]
        own = mixed + token[:, None] * width + head * DIM + p[None, :]
        x = tl.load(own, mask=some, other=0.0).to(tl.float32)
        total = tl.cumsum(step * fading, 0)
        whole = tl.sum(step * fading, 0)
        between = tl.exp(tl.where(past, total[:, None] - total[None, :], float("-inf")))
        read *= tl.exp(total)[:, None]
        read += tl.dot(likeness * between * step[None, :], x, input_precision=PRECISION)
        read += x * skipped
        if GATED:
            beside = gate + token[:, None] * gate_stride + head * DIM + p[None, :]
            read *= open_gate(tl.load(beside, mask=some, other=0.0), gate_factor)
        target = out + (token[:, None] * HEADS + head) * DIM + p[None, :]
        tl.store(target, read.to(out.dtype.element_ty), mask=some)
        left = x * (step * tl.exp(whole - total))[:, None]
        moved = ()
        for block in tl.static_range(blocks):
            n = block * BLOCK_STATE + tl.arange(0, BLOCK_STATE)
            if blocks > 1:  # registers hold no more than one
                b, _ = load_selected(shared, token, live, n, width, GROUPS, STATE)
            b = tl.trans(b.to(tl.float32))
            old = state[block] * tl.exp(whole)
            moved += (old + tl.dot(b, left, input_precision=PRECISION),)
        state = moved
    after = states + tl.load(writes + row) * HEADS * DIM * STATE
    for block in tl.static_range(blocks):
        n = block * BLOCK_STATE + tl.arange(0, BLOCK_STATE)
        at = (head * DIM + p[None, :]) * STATE + n[:, None]
        tl.store(after + at, state[block], mask=there & (n < STATE)[:, None])


@triton.jit
def load_selected(
    shared, token, live, n, width: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr
):
    """Return numbers `n` of b and c of some tokens, [LENGTH, BLOCK_STATE] each."""
    some = live[:, None] & (n < STATE)[None, :]
    from_here = shared + token[:, None] * width + n[None, :]
    b = tl.load(from_here, mask=some, other=0.0)
    return b, tl.load(from_here + GROUPS * STATE, mask=some, other=0.0)


@triton.jit
def open_gate(x, factor):
    """Return SiLU of a gate times a factor, in float32."""
    x = x.to(tl.float32) * factor
    return x * tl.sigmoid(x)


@triton.jit
def bound(step, least, most):
    """Return time steps within bounds; what is not a number remains that."""
    step = tl.where(step < least, least, step)
    return tl.where(step > most, most, step)


@triton.jit
def finish_mamba2(
    out,  # [T, GROUPS, SIZE], written
    read,  # float32 [T, GROUPS, SIZE]
    gate,  # [T, GROUPS, SIZE], with a stride between tokens
    norm,  # float32 [GROUPS, SIZE]
    gate_stride,
    gate_factor,
    eps,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BEFORE: tl.constexpr,  # the norm comes before the gate
):
    """Multiply what a group's heads read by SiLU of the gate, and normalise it (RMS)."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, PADDED)
    inside = place < SIZE
    own = group * SIZE + place
    value = tl.load(read + token * GROUPS * SIZE + own, mask=inside, other=0.0)
    opened = tl.load(gate + token * gate_stride + own, mask=inside, other=0.0)
    opened = open_gate(opened, gate_factor)
    if not BEFORE:
        value *= opened
    value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    value *= tl.load(norm + own, mask=inside, other=0.0)
    if BEFORE:
        value *= opened
    place = out + token * GROUPS * SIZE + own
    tl.store(place, value.to(out.dtype.element_ty), mask=inside)
# fmt: on
