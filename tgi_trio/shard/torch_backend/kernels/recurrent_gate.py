"""RG-LRU (De and others 2024: Griffin) over rows of any lengths (`states/recurrent_gate_layer.py`).

Both gates of a channel are linear in all channels of its head, which are products on tensor cores.
The recurrence goes through a row's tokens in chunks: what the tokens of a chunk do to the state is
put together pair by pair. All is float32. Offsets are of 64 bits wherever rows, tokens or slots are
involved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.fused import activate
from tgi_trio.shard.torch_backend.kernels.recurring import chain, find_row

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
    rate,  # float32 [HEADS, DIM]: a decay's logarithm where its gate is wide open, negative
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
    channel, place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, INPUTS)
    live, inside = token < tokens, channel < DIM
    own = x + token[:, None] * HEADS * DIM + head * DIM
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
    target = token[:, None] * HEADS * DIM + each[None, :]
    tl.store(entered + target, value * tl.sigmoid(of_entry), mask=some)
    speed = tl.load(rate + each, mask=inside, other=0.0)
    tl.store(logarithms + target, tl.sigmoid(of_decay) * speed[None, :], mask=some)


@triton.jit
def scan_gated(
    out,  # [T, CHANNELS], written
    entered,  # float32 [T, CHANNELS]: as `open_gates` writes them
    logarithms,  # likewise
    beside,  # [T, CHANNELS], with `stride` between tokens: the other branch
    starts,  # int64 [R + 1]: the rows' first tokens; not read with DECODES
    states,  # float32 [slots, CHANNELS]
    reads,  # int64 [R]: slots of `states`
    writes,  # likewise
    fresh,  # bool [R]: the state before is zero
    stride,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of a program
    LENGTH: tl.constexpr,  # tokens of a chunk
    ACT: tl.constexpr,  # of the other branch
    DECODES: tl.constexpr,  # every row is one token
):
    """Move the states of some channels by all tokens of a row; they are multiplied by `beside`.

    Inputs are scaled by sqrt(1 - a^2) for a decay a, so that the state remains as large as these
    however slowly it decays; a sequence's first token, which finds no state, is not scaled.
    """
    dtype = out.dtype.element_ty
    row = tl.program_id(0)
    first, end = find_row(starts, row, DECODES)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, LENGTH)
    inside = channel < CHANNELS
    begins = tl.load(fresh + row) != 0
    held = inside & (begins == 0) & (end > first)
    before = states + tl.load(reads + row) * CHANNELS + channel
    state = tl.load(before, mask=held, other=0.0)
    for low in range(first, end, LENGTH):
        token = (low + place).to(tl.int64)
        some = (token < end)[:, None] & inside[None, :]
        at = token[:, None] * CHANNELS + channel[None, :]
        logarithm = tl.load(logarithms + at, mask=some, other=0.0)
        value = tl.load(entered + at, mask=some, other=0.0)
        unscaled = (begins & (token == first))[:, None]
        value *= tl.where(unscaled, 1.0, tl.sqrt(1.0 - tl.exp(2.0 * logarithm)))
        decay = tl.exp(logarithm)
        if LENGTH > 1:
            decay, value = tl.associative_scan((decay, value), 0, chain)
        after = value + decay * state[None, :]
        state = tl.sum(tl.where((place == LENGTH - 1)[:, None], after, 0.0), 0)
        other = tl.load(beside + token[:, None] * stride + channel[None, :], mask=some, other=0.0)
        other = activate(other.to(tl.float32), ACT).to(dtype).to(tl.float32)
        result = after.to(dtype).to(tl.float32) * other
        tl.store(out + at, result.to(dtype), mask=some)
    target = states + tl.load(writes + row) * CHANNELS + channel
    tl.store(target, state, mask=inside & (end > first))
# fmt: on
