"""Truncations of a row whose best candidates do not decide: thousands of tokens may survive.

The rules are those of `shard/wide_truncation.py`, which sorts. Here every cut is the same question:
how far from a centre does one have to go until the tokens within have a given mass? Top-k counts
tokens by cost, top-p weighs them by cost, typical-p weighs them by their distance from the mean
cost. What is farther is masked.

`cut` answers it without sorting. The distance is bracketed by halving, each time with a pass over
the row, until some hundred tokens lie in the bracket. These are distributed over buckets, and the
bucket in which the mass is reached is distributed again, until all in it are at one distance.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu.kernels import kernel
from tgi_trio.shard.cpu.kernels.arrays import doubles_at, floats_at, ints_at
from tgi_trio.shard.cpu.kernels.sampling.scores import (
    CHUNK,
    CHUNK_BYTES,
    VECTOR_BYTES,
    measure,
    weights,
)
from tgi_trio.shard.cpu.kernels.variant import LANES
from tgi_trio.shard.cpu.kernels.vectors import (
    absolute,
    add,
    fill,
    largest,
    load,
    store,
    subtract,
    total,
    where_at_least,
)

BUCKETS = 512
_WIDEST = 32.0  # nats: the first bracket; farther tokens are hardly ever wanted
_HALVINGS = 12
_FLUSH = 32  # vectors that are summed up in float32
_LOWEST = np.float32(np.finfo(np.float32).min)
# A thread's memory: vectors to take apart, the buckets' masses, all weights, then a list of tokens.
_MASSES, _WEIGHTS = 256, 256 + 8 * BUCKETS


def room_bytes(chunks: int) -> int:
    """Return the memory a thread needs for rows of so many chunks."""
    return _WEIGHTS + 20 * chunks * CHUNK


@kernel
def distances(scores, centre):
    """Return how far the costs of 16 tokens are from the centre."""
    return absolute(add(scores, centre))


@kernel
def weigh(row, counts, where):
    """Write the weights of all tokens; if they are counted, 1 for each that is not masked."""
    for i in range(0, row.chunks * CHUNK_BYTES, VECTOR_BYTES):
        scores = load(row.scores + i)
        if counts:
            store(where + i, where_at_least(_LOWEST, scores, fill(1.0), fill(0.0)))
        else:
            store(where + i, weights(scores))


@kernel
def mass_within(row, centre, limit, own):
    """Return the mass of all tokens at most `limit` from the centre."""
    mass, none = 0.0, fill(0.0)
    for begin in range(0, row.chunks * CHUNK_BYTES, _FLUSH * VECTOR_BYTES):
        sums = fill(0.0)
        end = min(begin + _FLUSH * VECTOR_BYTES, row.chunks * CHUNK_BYTES)
        for i in range(begin, end, VECTOR_BYTES):
            nearness = subtract(none, distances(load(row.scores + i), centre))
            sums = add(sums, where_at_least(-limit, nearness, load(own + i), none))
        mass += total(sums)
    return mass


@kernel
def bracket(row, centre, wanted, own):
    """Return distances (low, high] within which the mass gets to `wanted`, and the mass to low."""
    low, high, before = np.float32(-1.0), np.float32(np.inf), 0.0
    middle = np.float32(_WIDEST)
    for _ in range(_HALVINGS):
        mass = mass_within(row, centre, middle, own)
        if mass >= wanted:
            high = middle
        else:
            low, before = middle, mass
        if high == np.inf:
            break
        middle = np.float32((max(low, np.float32(0.0)) + high) * 0.5)
    return low, high, before


@kernel
def list_bracket(row, centre, low, high, own, room, away, mass, ids):
    """List the tokens with low < distance <= high, lower ids first; return how many there are."""
    far, weight = floats_at(room, LANES), floats_at(room + VECTOR_BYTES, LANES)
    none, listed = fill(0.0), 0
    for vector in range(row.chunks * (CHUNK // LANES)):
        at = vector * VECTOR_BYTES
        distance = distances(load(row.scores + at), centre)
        beyond = where_at_least(low, distance, load(own + at), none)
        if largest(where_at_least(-high, subtract(none, distance), beyond, none)) == 0.0:
            continue
        store(room, distance)
        store(room + VECTOR_BYTES, load(own + at))
        for lane in range(LANES):
            if low < far[lane] <= high and weight[lane] > 0.0:
                away[listed], mass[listed] = far[lane], weight[lane]
                ids[listed] = vector * LANES + lane
                listed += 1
    return listed


@kernel
def bucket_reached(masses, wanted):
    """Return the bucket in which the mass gets to `wanted`, and the mass before it.

    Where it never gets there, for rounding, that is the last bucket that is not empty.
    """
    bucket, before, after = 0, 0.0, 0.0
    for i in range(BUCKETS):
        if masses[i] > 0.0:
            bucket, before, after = i, after, after + masses[i]
            if after >= wanted:
                break
    return bucket, before


@kernel
def narrow_list(away, own, ids, listed, masses, wanted):
    """Distribute a list of tokens again and again until all are at one distance.

    They are moved to the list's front, lower ids first. Returns how many they are, and the mass
    that is still wanted of them.
    """
    while True:
        low = high = np.float64(away[0])
        for i in range(1, listed):
            low, high = min(low, away[i]), max(high, away[i])
        if low == high:
            return listed, wanted
        per_bucket = (BUCKETS - 1) / (high - low)  # so low and high are never in the same
        masses[:] = 0.0
        for i in range(listed):
            masses[int((away[i] - low) * per_bucket)] += own[i]
        bucket, before = bucket_reached(masses, wanted)
        kept = 0
        for i in range(listed):
            if int((away[i] - low) * per_bucket) == bucket:
                away[kept], own[kept], ids[kept] = away[i], own[i], ids[i]
                kept += 1
        listed, wanted = kept, wanted - before


@kernel
def cut(row, centre, counts, wanted, ties, room):
    """Mask all tokens farther from the centre than it takes to reach the mass `wanted`.

    Of several tokens at that distance all stay if `ties`, else as few as it takes, lower ids first.
    """
    size, middle, own = row.chunks * CHUNK, fill(centre), room + _WEIGHTS
    away, mass = floats_at(own + 4 * size, size), floats_at(own + 8 * size, size)
    ids, masses = ints_at(own + 12 * size, size), doubles_at(room + _MASSES, BUCKETS)
    weigh(row, counts, own)
    low, high, before = bracket(row, middle, wanted, own)
    listed = list_bracket(row, middle, low, high, own, room, away, mass, ids)
    if listed == 0:  # for rounding, all that is there does not make the mass
        return
    listed, wanted = narrow_list(away, mass, ids, listed, masses, wanted - before)
    for at in range(row.scores, row.scores + row.chunks * CHUNK_BYTES, VECTOR_BYTES):
        value = load(at)
        nearness = subtract(fill(0.0), distances(value, middle))
        store(at, where_at_least(-away[0], nearness, value, fill(-np.inf)))
    if not ties:
        scores, reached = floats_at(row.scores, size), 0.0
        for i in range(listed):
            if i > 0 and reached >= wanted:
                scores[ids[i]] = -np.inf
            reached += mass[i]


@kernel
def truncate(row, room):
    """Mask what top-k, top-p and typical-p leave out, in this order."""
    for rule in range(3):
        if (
            (rule == 0 and row.top_k == 0)
            or (rule == 1 and row.top_p >= 1.0)
            or (rule == 2 and row.typical_p >= 1.0)
        ):
            continue
        mass, entropy = measure(row, rule == 2)
        wanted, centre = np.float64(row.top_k), 0.0
        if rule == 1:
            wanted = row.top_p * mass
        elif rule == 2:
            wanted, centre = row.typical_p * mass, entropy - np.log(mass)  # the mean cost
        cut(row, np.float32(centre), rule == 0, wanted, rule != 1, room)
