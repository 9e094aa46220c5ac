"""RG-LRU (De and others 2024: Griffin) over rows of any lengths (`states/recurrent_gate_layer.py`).

Both gates of a channel are linear in all channels of its head, which are products on tensor cores.
The recurrence goes through a row's tokens in chunks: what the tokens of a chunk do to the state is
put together pair by pair. All is float32. Offsets are of 64 bits wherever rows, tokens or slots are
involved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.activations import activate
from tgi_trio.shard.torch_backend.kernels.states.recurrence import chain

# fmt: off


@triton.jit(do_not_specialize=["tokens"])
def open_gates(
    entered,  # float32 [T, HEADS, DIM], written: inputs, times their gate
    logarithms,  # float32 [T, HEADS, DIM], written: of decays
    x,  # [T, HEADS, DIM]
    entry,  # float32 [HEADS, DIM, DIM], inputs first
    entry_bias,  # float32 [HEADS, DIM]
    decay,  # as `entry`
    decay_bias,  # as `entry_bias`
    slowest,  # float32 [HEADS, DIM]: a decay's logarithm where its gate is wide open, negative
    tokens,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,  # channels of a program
    INPUTS: tl.constexpr,  # that it multiplies at a time
    PRECISION: tl.constexpr,  # of products
):
    """Compute the gates of some channels of a head, for some tokens."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    value, logarithm = gate_inputs(
        x, entry, entry_bias, decay, decay_bias, slowest, token, head, channel, tokens,
        HEADS, DIM, TOKENS, BLOCK, INPUTS, PRECISION,
    )
    target = (token[:, None] * HEADS + head) * DIM + channel[None, :]
    some = (token < tokens)[:, None] & (channel < DIM)[None, :]
    tl.store(entered + target, value, mask=some)
    tl.store(logarithms + target, logarithm, mask=some)


@triton.jit(do_not_specialize=["tokens"])
def step_gated(
    out,  # [R, HEADS, DIM], written
    x, entry, entry_bias, decay, decay_bias, slowest,  # as for `open_gates`, of a token a row
    beside,  # [R, HEADS, DIM], with `stride` between rows: the other branch
    states,  # float32 [slots, HEADS, DIM]
    reads,  # int64 [R]: slots of `states`
    writes,  # likewise
    fresh,  # bool [R]: the state before is zero
    stride,
    tokens,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    INPUTS: tl.constexpr,
    ACT: tl.constexpr,  # of the other branch
    PRECISION: tl.constexpr,
):
    """Move some channels of some rows' states by their only tokens, as `scan_gated` does."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    value, logarithm = gate_inputs(
        x, entry, entry_bias, decay, decay_bias, slowest, token, head, channel, tokens,
        HEADS, DIM, TOKENS, BLOCK, INPUTS, PRECISION,
    )
    live = token < tokens
    some = live[:, None] & (channel < DIM)[None, :]
    begins = (tl.load(fresh + token, mask=live, other=0) != 0)[:, None]
    each = (head * DIM + channel)[None, :]
    before = states + tl.load(reads + token, mask=live, other=0)[:, None] * HEADS * DIM + each
    state = tl.load(before, mask=some & (begins == 0), other=0.0)
    state = scale_input(value, logarithm, begins) + tl.exp(logarithm) * state
    after = states + tl.load(writes + token, mask=live, other=0)[:, None] * HEADS * DIM + each
    tl.store(after, state, mask=some)
    other = tl.load(beside + token[:, None] * stride + each, mask=some, other=0.0)
    target = out + token[:, None] * HEADS * DIM + each
    tl.store(target, multiply_branches(state, other, ACT, out.dtype.element_ty), mask=some)


@triton.jit
def gate_inputs(
    x, entry, entry_bias, decay, decay_bias, slowest, token, head, channel, tokens,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    INPUTS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Return inputs, times their gate, and the logarithms of decays, [TOKENS, BLOCK] each."""
    place = tl.arange(0, INPUTS)
    live, inside = token < tokens, channel < DIM
    own = x + (token[:, None] * HEADS + head) * DIM
    of_entry = tl.zeros([TOKENS, BLOCK], tl.float32)
    of_decay = tl.zeros([TOKENS, BLOCK], tl.float32)
    for low in range(0, DIM, INPUTS):
        k = low + place
        some = live[:, None] & (k < DIM)[None, :]
        part = tl.load(own + k[None, :], mask=some, other=0.0).to(tl.float32)
        at = (head * DIM + k[:, None]) * DIM + channel[None, :]
        there = (k < DIM)[:, None] & inside[None, :]
        weight = tl.load(entry + at, mask=there, other=0.0)
        of_entry = tl.dot(part, weight, of_entry, input_precision=PRECISION)
        weight = tl.load(decay + at, mask=there, other=0.0)
        of_decay = tl.dot(part, weight, of_decay, input_precision=PRECISION)
    each = head * DIM + channel
    of_entry += tl.load(entry_bias + each, mask=inside, other=0.0)[None, :]
    of_decay += tl.load(decay_bias + each, mask=inside, other=0.0)[None, :]
    some = live[:, None] & inside[None, :]
    value = tl.load(own + channel[None, :], mask=some, other=0.0).to(tl.float32)
    speed = tl.load(slowest + each, mask=inside, other=0.0)
    return value * tl.sigmoid(of_entry), tl.sigmoid(of_decay) * speed[None, :]


@triton.jit
def scale_input(value, logarithm, begins):
    """Return inputs as they enter a state: scaled by sqrt(1 - a^2) for a decay a.

    So the state remains as large as these however slowly it decays; a sequence's first token, which
    finds no state, is not scaled.
    """
    return value * tl.where(begins, 1.0, tl.sqrt(1.0 - tl.exp(2.0 * logarithm)))


@triton.jit
def multiply_branches(state, beside, ACT: tl.constexpr, dtype: tl.constexpr):
    """Return a state times the activation of the other branch, both rounded, in a dtype."""
    other = activate(beside.to(tl.float32), ACT).to(dtype).to(tl.float32)
    return (state.to(dtype).to(tl.float32) * other).to(dtype)


@triton.jit
def scan_gated(
    out,  # [T, CHANNELS], written
    entered,  # float32 [T, CHANNELS]: as `open_gates` writes them
    logarithms,  # likewise
    beside,  # [T, CHANNELS], with `stride` between tokens: the other branch
    starts,  # int64 [R + 1]: the rows' first tokens
    states,  # float32 [slots, CHANNELS]
    reads,  # int64 [R]: slots of `states`
    writes,  # likewise
    fresh,  # bool [R]: the state before is zero
    stride,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of a program
    LENGTH: tl.constexpr,  # tokens of a chunk
    ACT: tl.constexpr,  # of the other branch
):
    """Move the states of some channels by all tokens of a row; they are multiplied by `beside`."""
    row = tl.program_id(0)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, LENGTH)
    inside = channel < CHANNELS
    begins = tl.load(fresh + row) != 0
    held = inside & (begins == 0) & (end > first)
    before = states + tl.load(reads + row) * CHANNELS + channel
    state = tl.load(before, mask=held, other=0.0)
    for low in range(first, end, LENGTH):
        token = low + place
        some = (token < end)[:, None] & inside[None, :]
        at = token[:, None] * CHANNELS + channel[None, :]
        logarithm = tl.load(logarithms + at, mask=some, other=0.0)
        value = tl.load(entered + at, mask=some, other=0.0)
        value = scale_input(value, logarithm, (begins & (token == first))[:, None])
        decay, value = tl.associative_scan((tl.exp(logarithm), value), 0, chain)
        after = value + decay * state[None, :]
        state = tl.sum(tl.where((place == LENGTH - 1)[:, None], after, 0.0), 0)
        other = tl.load(beside + token[:, None] * stride + channel[None, :], mask=some, other=0.0)
        tl.store(out + at, multiply_branches(after, other, ACT, out.dtype.element_ty), mask=some)
    target = states + tl.load(writes + row) * CHANNELS + channel
    tl.debug_barrier()  # all threads have read the state, should both slots be the same
    tl.store(target, state, mask=inside & (end > first))
# fmt: on
