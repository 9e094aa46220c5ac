"""Truncations of a row that its best candidates do not decide: thousands of tokens may survive.

The rules are those of `shard/torch_backend/sampling/wide_truncation.py`, which sorts. Here every
cut is the same question: within which distance from a centre do tokens have a given mass? Top-k
counts tokens by cost; top-p weighs them, by cost; typical-p weighs them, by distance from the mean
cost. Tokens farther away are masked.

`cut` answers it without sorting. Passes over the row narrow a bracket around the answer, by testing
three distances each: first those that quarter the bracket; then, when the mass grows almost
linearly within it, those around the linear interpolation. Finally the tokens in the bracket are
listed and distributed over buckets, and those of the bucket in which the mass is reached are
distributed again, until all are at one distance.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import (
    doubles_at,
    floats_at,
    greater,
    ints_at,
    lesser,
)
from tgi_trio.shard.cpu_backend.kernels.sampling.scores import (
    CHUNK_BYTES,
    VECTOR_BYTES,
    measure,
    reading,
    relative,
)
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    absolute,
    add,
    fill,
    first_lane,
    lanes_at_least,
    load,
    store,
    subtract,
    total,
    where_at_least,
)
from tgi_trio.shard.cpu_backend.scratch_memory import BUCKETS, CHUNK, WEIGHTS
from tgi_trio.shard.cpu_backend.weight_layout import LANES

_WIDEST = 32.0  # nats: the first bracket; few rows need tokens farther away
_QUARTERINGS, _PASSES = 3, 5  # passes that quarter the bracket, and all passes
_NEAR = 1.0 / 16.0  # of a bracket, to either side of the interpolated answer
_FLUSH = 32  # vectors that are summed in float32
_LOWEST = np.float32(np.finfo(np.float32).min)
# A thread's scratch memory: the buckets' masses, all weights, then a list of tokens.


@kernel
def settle(row):
    """Write the row's scores in place relative to the best one and divided by the temperature."""
    how = reading(row)
    for at in range(row.scores, row.scores + row.chunks * CHUNK_BYTES, VECTOR_BYTES):
        store(at, relative(how, load(at)))
    row.best, row.sharpness = 0.0, 1.0


@kernel
def nearness(scores, centre):
    """Return minus the distances of 16 tokens' costs from the centre."""
    return subtract(fill(0.0), absolute(add(scores, centre)))


@kernel
def count_tokens(row, where):
    """Write 1 for every unmasked token, 0 for the others; return the number of unmasked ones."""
    count, none = 0.0, fill(0.0)
    for begin in range(0, row.chunks * CHUNK_BYTES, CHUNK_BYTES):
        sums = none
        for i in range(begin, begin + CHUNK_BYTES, VECTOR_BYTES):
            own = where_at_least(_LOWEST, load(row.scores + i), fill(1.0), none)
            store(where + i, own)
            sums = add(sums, own)
        count += total(sums)
    return count


@kernel
def masses_within(row, centre, limits, own):
    """Return the masses of all tokens at most so far from the centre, for three distances."""
    first, second, third = limits
    mass_a, mass_b, mass_c, none = 0.0, 0.0, 0.0, fill(0.0)
    for begin in range(0, row.chunks * CHUNK_BYTES, _FLUSH * VECTOR_BYTES):
        a, b, c = none, none, none
        end = lesser(begin + _FLUSH * VECTOR_BYTES, row.chunks * CHUNK_BYTES)
        for i in range(begin, end, VECTOR_BYTES):
            near, mass = nearness(load(row.scores + i), centre), load(own + i)
            a = add(a, where_at_least(-first, near, mass, none))
            b = add(b, where_at_least(-second, near, mass, none))
            c = add(c, where_at_least(-third, near, mass, none))
        mass_a, mass_b, mass_c = mass_a + total(a), mass_b + total(b), mass_c + total(c)
    return mass_a, mass_b, mass_c


@kernel
def bracket(row, centre, mass, wanted, own):
    """Return (low, high, mass up to low): the mass `wanted` is reached within (low, high].

    `mass`: that of the whole row.
    """
    low, high, before, after = np.float32(-1.0), np.float32(np.inf), 0.0, mass
    guess, near = 0.5 * _WIDEST, 0.5 * _WIDEST
    for done in range(1, _PASSES + 1):
        limits = (np.float32(guess - near), np.float32(guess), np.float32(guess + near))
        masses = masses_within(row, centre, limits, own)
        for i in range(3):
            if masses[i] >= wanted and limits[i] < high:
                high, after = limits[i], masses[i]
            if masses[i] < wanted and limits[i] > low:
                low, before = limits[i], masses[i]
        if high == np.inf:
            break
        width, part = high - low, 0.5
        near = 0.25 * width
        if done >= _QUARTERINGS:
            near, part = _NEAR * width, (wanted - before) / (after - before)
        guess = low + part * width
    return low, high, before


@kernel
def list_bracket(row, centre, low, high, own, away, mass, ids):
    """List the tokens with low < distance <= high, lower ids first; return their number."""
    scores, weights = floats_at(row.scores, row.chunks * CHUNK), floats_at(own, row.chunks * CHUNK)
    listed = 0
    for vector in range(row.chunks * (CHUNK // LANES)):
        near = nearness(load(row.scores + vector * VECTOR_BYTES), fill(centre))
        lanes = lanes_at_least(-high, near) & ~lanes_at_least(-low, near)
        while lanes:
            token = vector * LANES + first_lane(lanes)
            lanes &= lanes - 1
            if weights[token] > 0.0:
                away[listed], mass[listed] = abs(scores[token] + centre), weights[token]
                ids[listed] = token
                listed += 1
    return listed


@kernel
def bucket_reached(masses, wanted):
    """Return the bucket in which the mass reaches `wanted`, and the mass before it.

    If rounding keeps it from being reached, that is the last bucket that is not empty.
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
    """Distribute a list of tokens over buckets repeatedly, until all are at one distance.

    They are moved to the list's front, lower ids first. Returns how many are left, and the mass
    that is still wanted of them.
    """
    while True:
        low = high = np.float64(away[0])
        for i in range(1, listed):
            low, high = lesser(low, away[i]), greater(high, away[i])
        if low == high:
            return listed, wanted
        per_bucket = (BUCKETS - 1) / (high - low)  # so low and high are never in one bucket
        masses[:] = 0.0
        for i in range(listed):
            masses[np.int64((away[i] - low) * per_bucket)] += own[i]
        bucket, before = bucket_reached(masses, wanted)
        kept = 0
        for i in range(listed):
            if np.int64((away[i] - low) * per_bucket) == bucket:
                away[kept], own[kept], ids[kept] = away[i], own[i], ids[i]
                kept += 1
        listed, wanted = kept, wanted - before


@kernel
def cut(row, centre, mass, wanted, ties, room):
    """Mask all tokens farther from the centre than needed to reach the mass `wanted`.

    `mass`: that of all tokens; each token's is in `room`. Of several tokens at the final distance
    all stay if `ties`, else as few as needed, lower ids first.
    """
    size, own = row.chunks * CHUNK, room + WEIGHTS
    away, weights = floats_at(own + 4 * size, size), floats_at(own + 8 * size, size)
    ids, masses = ints_at(own + 12 * size, size), doubles_at(room, BUCKETS)
    low, high, before = bracket(row, fill(centre), mass, wanted, own)
    listed = list_bracket(row, centre, low, high, own, away, weights, ids)
    if listed == 0:  # because of rounding, the whole row does not reach the mass
        return
    listed, wanted = narrow_list(away, weights, ids, listed, masses, wanted - before)
    for at in range(row.scores, row.scores + row.chunks * CHUNK_BYTES, VECTOR_BYTES):
        value = load(at)
        near = nearness(value, fill(centre))
        store(at, where_at_least(-away[0], near, value, fill(-np.inf)))
    if not ties:
        scores, reached = floats_at(row.scores, size), 0.0
        for i in range(listed):
            if i > 0 and reached >= wanted:
                scores[ids[i]] = -np.inf
            reached += weights[i]


@kernel
def truncate(row, room):
    """Mask what top-k, top-p and typical-p exclude, in this order; the floor applies after them."""
    floor, row.floor = row.floor, np.float32(-np.inf)
    settle(row)
    for rule in range(3):
        if (
            (rule == 0 and row.top_k == 0)
            or (rule == 1 and row.top_p >= 1.0)
            or (rule == 2 and row.typical_p >= 1.0)
        ):
            continue
        centre, entropy = 0.0, 0.0
        if rule == 0:
            mass, wanted = count_tokens(row, room + WEIGHTS), np.float64(row.top_k)
        else:
            mass, entropy = measure(row, rule == 2, room + WEIGHTS)
            wanted = mass * (row.top_p if rule == 1 else row.typical_p)
        if rule == 2:
            centre = entropy - np.log(mass)  # the mean cost
        cut(row, np.float32(centre), mass, wanted, rule != 1, room)
    row.floor = floor
