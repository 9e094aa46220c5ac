"""Keys of an index of runs of tokens, over latents: a mean of tokens' keys, by learned weights.

They are those of `torch_backend/attention/indexed/reference_runs.py`. The cache has a token's key,
normalised, and its weights in the mean, a number each; when a run is whole, its key takes the place
of its last token's key, as in `keys.py`. Nothing is rotated.
"""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.attention import seen_tokens
from tgi_trio.shard.cpu_backend.kernels.norm import inverse_deviation, normed
from tgi_trio.shard.cpu_backend.kernels.pooled.keys import slot_of, store_key
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    copy_word,
    divide,
    fill,
    fma,
    load,
    load_int,
    load_stored,
    maximum,
    multiply,
    store_float,
    subtract,
    total,
    weight,
)
from tgi_trio.shard.cpu_backend.tables import Buffer
from tgi_trio.shard.cpu_backend.weight_layout import LANES

PROJECTED, ASKED = int(Buffer.PROJECTED), int(Buffer.ASKED)
_LEAST = -1e30


@kernel
def ask_runs(variant, step, op, blocks, t):
    """Write a token's key and weights to the cache, and its queries to ASKED, as `ask` does.

    Key, weights of heads and weights in the mean are at `offset` in a row of PROJECTED, queries in
    `source`.
    """
    size, key = op.head_dim, step.buffers[PROJECTED] + (t * op.inputs + op.offset) * 4
    slot, sums = load_int(step.slots + 4 * t), fill(0.0)
    for i in range(0, size, LANES):
        sums = add(sums, load(key + 4 * i))
    mean = total(sums) / size
    centre, factor = fill(mean), fill(inverse_deviation(key, size, mean, op.eps))
    for i in range(0, size, LANES):
        store_key(variant, op, blocks, slot, i, normed(op, key, i, centre, factor))
        own = load(key + 4 * (size + op.heads + i))
        store_key(variant, op, blocks, slot, size + i, own)
    if seen_tokens(step, op, t) <= op.most:
        return
    source = step.buffers[op.source] + t * op.width * 4
    padded = (op.heads + LANES - 1) // LANES * LANES
    for head in range(padded):
        target = step.buffers[ASKED] + (t * padded + head // LANES * LANES) * size * 4
        target += head % LANES * 4
        for i in range(size):
            if head < op.heads:
                copy_word(target + 4 * LANES * i, source + 4 * (head * size + i))
            else:
                store_float(target + 4 * LANES * i, 0.0)


@kernel
def pool_run(variant, step, op, blocks, t):
    """Write the key of the run that a token ends, if it ends one, in place of the token's.

    Of each number, weights are a softmax over the tokens of the run.
    """
    size, position = op.head_dim, load_int(step.positions + 4 * t)
    if (position + 1) % blocks.size:
        return
    first, scale = position + 1 - blocks.size, fill(op.key_scale)
    slot, stored = load_int(step.slots + 4 * t), variant.cache.bytes
    for i in range(0, size, LANES):
        most, sums, masses = fill(_LEAST), fill(0.0), fill(0.0)
        for pass_ in range(2):
            for j in range(blocks.size):
                row = op.keys + (slot_of(step, t, first + j) * blocks.kept + i) * stored
                own = multiply(load_stored(variant.cache, row + size * stored), scale)
                if op.bias:
                    own = add(own, load(op.bias + 4 * (j * size + i)))
                if pass_ == 0:
                    most = maximum(own, most)
                else:
                    own = weight(subtract(own, most))
                    masses = add(masses, own)
                    key = multiply(load_stored(variant.cache, row), scale)
                    sums = fma(own, key, sums)
        store_key(variant, op, blocks, slot, i, divide(sums, masses))
