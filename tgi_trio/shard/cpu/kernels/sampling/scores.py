"""What is known of a row after reading it: chunk maxima, chunk masses, entropy."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu.kernels import kernel
from tgi_trio.shard.cpu.kernels.arrays import floats_at
from tgi_trio.shard.cpu.kernels.variant import LANES
from tgi_trio.shard.cpu.kernels.vectors import (
    add,
    divide,
    exp,
    fill,
    fma,
    largest,
    load,
    maximum,
    store,
    subtract,
    total,
    where_at_least,
    where_bits,
)

CHUNK = 64
VECTOR_BYTES, CHUNK_BYTES = 4 * LANES, 4 * CHUNK
_LEAST = -87.0  # below it a weight would not be a normal number: such a token is impossible
_FINITE = -1e30  # stands for -inf where it is multiplied by a weight of 0


@kernel
def weights(scores):
    """Return e^score of 16 scores, 0 for those that are masked."""
    return where_at_least(_LEAST, scores, exp(scores), fill(0.0))


@kernel
def mask(row):
    """Make the tokens impossible whose bits are 0."""
    for vector in range(row.chunks * (CHUNK // LANES)):
        at = row.scores + vector * VECTOR_BYTES
        store(at, where_bits(row.allowed + vector * (LANES // 8), load(at), fill(-np.inf)))


@kernel
def find_maxima(row):
    """Write the largest score of every chunk; return the row's, NaN where one of them is NaN."""
    maxima, scores = floats_at(row.maxima, row.chunks), floats_at(row.scores, row.chunks * CHUNK)
    best, sums, at = fill(-np.inf), fill(0.0), row.scores
    for chunk in range(row.chunks):
        a, b = load(at), load(at + VECTOR_BYTES)
        c, d = load(at + 2 * VECTOR_BYTES), load(at + 3 * VECTOR_BYTES)
        chunk_best = maximum(maximum(a, b), maximum(c, d))
        sums = add(sums, add(add(a, b), add(c, d)))
        best = maximum(chunk_best, best)
        maxima[chunk] = largest(chunk_best)
        at += CHUNK_BYTES
    # A maximum passes over NaN, a sum does not; but inf - inf is one as well.
    if np.isnan(total(sums)):
        for score in scores:
            if np.isnan(score):
                return score
    return largest(best)


@kernel
def scale(row, best):
    """Replace every score by (score - best) / temperature, by -inf where that is below the floor.

    A best score that is not finite leaves nothing to choose from: all scores become 0.
    """
    maxima, scores = floats_at(row.maxima, row.chunks), floats_at(row.scores, row.chunks * CHUNK)
    if not np.isfinite(best):
        scores[:] = 0.0
        maxima[:] = 0.0
        return
    centre, temperature, divides = fill(best), fill(row.temperature), row.temperature != 1.0
    for at in range(row.scores, row.scores + row.chunks * CHUNK_BYTES, VECTOR_BYTES):
        value = subtract(load(at), centre)
        if divides:
            value = divide(value, temperature)
        store(at, where_at_least(row.floor, value, value, fill(-np.inf)))
    for chunk in range(row.chunks):  # rounding keeps the order, so the maxima stay the maxima
        value = np.float32((maxima[chunk] - best) / row.temperature)
        maxima[chunk] = value if value >= row.floor else -np.inf


@kernel
def measure(row, entropy):
    """Write every chunk's mass, the sum of its weights; return the row's mass and entropy.

    The entropy, in nats, is 0 where it is not asked for. Within a chunk sums are float32, over
    chunks float64 and from left to right.
    """
    masses = floats_at(row.masses, row.chunks)
    mass, weighted, at = 0.0, 0.0, row.scores
    for chunk in range(row.chunks):
        sums, products = fill(0.0), fill(0.0)
        for _ in range(CHUNK // LANES):
            scores = load(at)
            own = weights(scores)
            sums = add(sums, own)
            if entropy:
                products = fma(own, maximum(scores, fill(_FINITE)), products)
            at += VECTOR_BYTES
        masses[chunk] = total(sums)
        mass += masses[chunk]
        if entropy:
            weighted += total(products)
    return mass, (np.log(mass) - weighted / mass if entropy else 0.0)
