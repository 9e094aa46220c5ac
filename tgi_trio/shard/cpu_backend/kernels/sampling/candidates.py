"""A row's best tokens in order, found with a heap.

A token's *key* is its cost's bits above its id. A cost is never negative, so its bits, read as an
integer, are in the order of the costs. So the smallest keys are the best tokens, with lower ids
first among equals. A max-heap holds the smallest keys so far. Chunks whose best token is not below
its top are skipped, which nearly all are.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import (
    bits_of,
    float_of,
    floats_at,
    ints_at,
    lesser,
)
from tgi_trio.shard.cpu_backend.kernels.sampling.scores import (
    VECTOR_BYTES,
    reading,
    relative,
    relative_one,
)
from tgi_trio.shard.cpu_backend.kernels.vectors import first_lane, lanes_at_least, load
from tgi_trio.shard.cpu_backend.scratch_memory import CHUNK
from tgi_trio.shard.cpu_backend.weight_layout import LANES


@kernel
def key_of(score, token):
    """Return the key of a token, an int64; `score` is at most 0."""
    return (bits_of(np.float32(0.0) - score) << 32) | token


@kernel
def sink(heap, size, key):
    """Replace the top of a heap of `size` keys by `key`, and sift it down."""
    place, child = 0, 1
    while child < size:
        if child + 1 < size and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= key:
            break
        heap[place] = heap[child]
        place, child = child, 2 * child + 1
    heap[place] = key


@kernel
def fill_heap(row, heap, width):
    """Fill the heap with the worst key; return a key above those of the `width` best tokens.

    The bound is the top of a heap of all chunks' best tokens, since that many chunks have a token
    at least as good.
    """
    maxima, worst = floats_at(row.maxima, row.chunks), key_of(np.float32(-np.inf), (1 << 32) - 1)
    heap[:] = worst
    for chunk in range(row.chunks):
        key = key_of(relative_one(row, maxima[chunk]), (chunk + 1) * CHUNK)
        if key < heap[0]:
            sink(heap, width, key)
    bound = heap[0]
    heap[:] = worst
    return bound


@kernel
def take_best(row, heap, width, vector, bound):
    """Add to the heap those of 16 tokens that are better than its worst, and than `bound`."""
    scores, at = floats_at(row.scores, row.chunks * CHUNK), row.scores + vector * VECTOR_BYTES
    lanes = lanes_at_least(-float_of(bound >> 32), relative(reading(row), load(at)))
    while lanes:
        token = vector * LANES + first_lane(lanes)
        lanes &= lanes - 1
        key = key_of(relative_one(row, scores[token]), token)
        if key < bound and key < heap[0]:
            sink(heap, width, key)


@kernel
def find_candidates(row, width):
    """Write the keys of the `width` best tokens, best first; masked tokens fill the rest."""
    heap, maxima = ints_at(row.keys, width), floats_at(row.maxima, row.chunks)
    bound = fill_heap(row, heap, width)
    for chunk in range(row.chunks):
        bound = lesser(bound, heap[0])
        if key_of(relative_one(row, maxima[chunk]), chunk * CHUNK) < bound:
            for vector in range(chunk * CHUNK // LANES, (chunk + 1) * CHUNK // LANES):
                take_best(row, heap, width, vector, lesser(bound, heap[0]))
    for size in range(width - 1, 0, -1):  # heapsort: the largest remaining key goes to the end
        key = heap[size]
        heap[size] = heap[0]
        sink(heap, size, key)
