"""Keys of an index of blocks: a token's until its block is whole, then the block's own.

They are those of `torch_backend/attention/indexed/reference_pooled.py`. The cache has rows of keys,
as they are projected; the key of a block, the norm of their mean, takes the place of its last
token's. It turns as the block's first token does, whose rotary positions are kept beside the keys.
"""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.attention import seen_tokens, table_of
from tgi_trio.shard.cpu_backend.kernels.latents import turn_part
from tgi_trio.shard.cpu_backend.kernels.norm import BLOCK, inverse_deviation
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    copy_word,
    divide,
    fill,
    load,
    load_int,
    load_stored,
    multiply,
    store,
    store_float,
    store_int,
    store_stored,
)
from tgi_trio.shard.cpu_backend.tables import Buffer
from tgi_trio.shard.cpu_backend.weight_layout import LANES

QKV, ASKED = int(Buffer.QKV), int(Buffer.ASKED)
_AXES = 3  # rotary positions of a token


@kernel
def ask(variant, step, op, blocks, t, scratch):
    """Write a token's key and rotary positions to the cache; normalise and rotate its queries.

    ASKED has 16 heads of a dimension side by side: float32 [T, heads / 16, dim, 16], with zeros for
    heads that there are not. `scratch`: room for three keys.
    """
    size, source = op.head_dim, step.buffers[QKV] + t * op.width * 4
    slot = load_int(step.slots + 4 * t)
    turns = op.values + 4 * _AXES * slot
    for axis in range(_AXES):
        place = step.turns + 4 * t + axis * step.turn_stride
        store_int(turns + 4 * axis, load_int(place))
    key = source + 4 * blocks.key
    for i in range(0, size, LANES):
        store_key(variant, op, blocks, slot, i, load(key + 4 * i))
    if seen_tokens(step, op, t) <= op.most:
        return
    angles = scratch + 8 * size
    gather_turn(op, turns, angles)
    padded = (op.heads + LANES - 1) // LANES * LANES
    for head in range(padded):
        target = step.buffers[ASKED] + (t * padded + head // LANES * LANES) * size * 4
        target += head % LANES * 4
        if head < op.heads:
            place = source + 4 * (blocks.queries + head * size)
            normalise_and_turn(op, place, op.query_norm, angles, scratch)
        for i in range(size):
            if head < op.heads:
                copy_word(target + 4 * LANES * i, scratch + 4 * (size + i))
            else:
                store_float(target + 4 * LANES * i, 0.0)


@kernel
def pool(variant, step, op, blocks, t, scratch):
    """Write the key of the block that a token ends, if it ends one, in place of the token's.

    It goes to the slot of this step, which is a spare one where a prefix is only computed again.
    `scratch`: room for three keys.
    """
    size, position = op.head_dim, load_int(step.positions + 4 * t)
    if (position + 1) % blocks.size:
        return
    first = position + 1 - blocks.size
    for i in range(0, size, LANES):
        store(scratch + 4 * i, fill(0.0))
    for place in range(first, position + 1):
        row = op.keys + slot_of(step, t, place) * blocks.kept * variant.cache.bytes
        for i in range(0, size, LANES):
            value = load_stored(variant.cache, row + i * variant.cache.bytes)
            store(scratch + 4 * i, add(load(scratch + 4 * i), value))
    share = fill(op.key_scale / blocks.size)
    for i in range(0, 4 * size, 4 * LANES):
        store(scratch + i, multiply(load(scratch + i), share))
    gather_turn(op, op.values + 4 * _AXES * slot_of(step, t, first), scratch + 8 * size)
    normalise_and_turn(op, scratch, op.key_norm, scratch + 8 * size, scratch)
    slot = load_int(step.slots + 4 * t)
    for i in range(0, size, LANES):
        store_key(variant, op, blocks, slot, i, load(scratch + 4 * (size + i)))


@kernel
def slot_of(step, t, place):
    """Return the slot of the token at a place of the context of token `t`."""
    return load_int(table_of(step, t) + 4 * (place // BLOCK)) * BLOCK + place % BLOCK


@kernel
def store_key(variant, op, blocks, slot, i, value):
    """Write 16 of the numbers that are kept of a token, from number `i` on."""
    if variant.cache.eight:
        value = divide(value, fill(op.key_scale))
    place = op.keys + (slot * blocks.kept + i) * variant.cache.bytes
    store_stored(variant.cache, place, value)


@kernel
def gather_turn(op, turns, target):
    """Gather the cosines, then the sines, of a token by its three rotary positions."""
    size = op.rotated // 2 * 4
    for i in range(0, size, 4):
        axis = load_int(op.axes + i) if op.axes else 0
        row = load_int(turns + 4 * axis) * size
        copy_word(target + i, op.cosines + row + i)
        copy_word(target + size + i, op.sines + row + i)


@kernel
def normalise_and_turn(op, source, gain, angles, scratch):
    """Write the rotated norm of a query or key at `source` behind the first key's room; `angles`:
    cosines, then sines. The first room is overwritten, in which `source` may be.
    """
    size = op.head_dim
    factor = fill(inverse_deviation(source, size, 0.0, op.eps))
    for i in range(0, 4 * size, 4 * LANES):
        store(scratch + i, multiply(multiply(load(source + i), factor), load(gain + i)))
    turn_part(op, scratch, size, angles, angles + 2 * op.rotated, scratch + 4 * size)
