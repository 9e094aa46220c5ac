"""Statistics of a row: chunk maxima, chunk masses, entropy."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import floats_at
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    fill,
    fma,
    largest,
    load,
    maximum,
    multiply,
    store,
    subtract,
    total,
    weight,
    where_at_least,
    where_bits,
)
from tgi_trio.shard.cpu_backend.scratch_memory import CHUNK
from tgi_trio.shard.cpu_backend.weight_layout import LANES

VECTOR_BYTES, CHUNK_BYTES = 4 * LANES, 4 * CHUNK
_FINITE = -1e30  # replaces -inf where it is multiplied by a weight of 0


@kernel
def reading(row):
    """Return the row's parameters for `relative`, to be held in registers."""
    return fill(row.best), fill(row.sharpness), row.floor


@kernel
def relative(how, scores):
    """Return 16 scores less the row's best, divided by the temperature; -inf below the floor."""
    best, sharpness, floor = how
    value = multiply(subtract(scores, best), sharpness)
    return where_at_least(floor, value, value, fill(-np.inf))


@kernel
def relative_one(row, score):
    """Apply `relative` to a single score."""
    value = (score - row.best) * row.sharpness
    return value if value >= row.floor else np.float32(-np.inf)


@kernel
def mask(row):
    """Set the scores of tokens whose bits are 0 to -inf."""
    for vector in range(row.chunks * (CHUNK // LANES)):
        at = row.scores + vector * VECTOR_BYTES
        store(at, where_bits(row.allowed + vector * (LANES // 8), load(at), fill(-np.inf)))


@kernel
def find_maxima(row):
    """Write the largest score of every chunk; return the row's, or NaN if any score is NaN."""
    maxima, scores = floats_at(row.maxima, row.chunks), floats_at(row.scores, row.chunks * CHUNK)
    best, sums, at = fill(-np.inf), fill(0.0), row.scores
    for chunk in range(row.chunks):
        chunk_best = fill(-np.inf)
        for _ in range(CHUNK // LANES // 2):
            a, b = load(at), load(at + VECTOR_BYTES)
            chunk_best = maximum(maximum(a, b), chunk_best)
            sums = add(sums, add(a, b))
            at += 2 * VECTOR_BYTES
        best = maximum(chunk_best, best)
        maxima[chunk] = largest(chunk_best)
    # A maximum ignores NaN, a sum does not; but inf - inf is NaN as well.
    if np.isnan(total(sums)):
        for score in scores:
            if np.isnan(score):
                return score
    return largest(best)


@kernel
def measure(row, entropy, kept):
    """Write every chunk's mass, the sum of its weights; return the row's mass and entropy.

    The entropy, in nats, is 0 unless requested. Sums are float32 within a chunk, float64 over
    chunks, from left to right. `kept`: the address for all weights, or 0.
    """
    masses, how = floats_at(row.masses, row.chunks), reading(row)
    mass, weighted, at = 0.0, 0.0, row.scores
    for chunk in range(row.chunks):
        sums, products = fill(0.0), fill(0.0)
        for _ in range(CHUNK // LANES):
            scores = relative(how, load(at))
            own = weight(scores)
            sums = add(sums, own)
            if entropy:
                products = fma(own, maximum(scores, fill(_FINITE)), products)
            if kept:
                store(kept, own)
                kept += VECTOR_BYTES
            at += VECTOR_BYTES
        masses[chunk] = total(sums)
        mass += masses[chunk]
        if entropy:
            weighted += total(products)
    return mass, (np.log(mass) - weighted / mass if entropy else 0.0)
