"""The entry: rows of scores, each with its settings; see `tables.ROW`."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import floats_at, ints_at, lesser
from tgi_trio.shard.cpu_backend.kernels.linked_calls import row_at
from tgi_trio.shard.cpu_backend.kernels.sampling.candidates import find_candidates
from tgi_trio.shard.cpu_backend.kernels.sampling.narrow import truncate
from tgi_trio.shard.cpu_backend.kernels.sampling.scores import (
    CHUNK_BYTES,
    VECTOR_BYTES,
    find_maxima,
    mask,
    measure,
    reading,
    relative,
    relative_one,
)
from tgi_trio.shard.cpu_backend.kernels.threads import atomic_add
from tgi_trio.shard.cpu_backend.kernels.vectors import load, store, weight
from tgi_trio.shard.cpu_backend.scratch_memory import CHUNK
from tgi_trio.shard.cpu_backend.tables import ROW

ROW_BYTES = ROW.itemsize
_BELOW_ONE = 1.0 - 2.0**-52  # keeps rounding from raising a target to the whole mass


@kernel
def first_best(row):
    """Return the first token with the best score."""
    maxima, scores = floats_at(row.maxima, row.chunks), floats_at(row.scores, row.chunks * CHUNK)
    chunk = 0
    while maxima[chunk] < row.best:
        chunk += 1
    token = chunk * CHUNK
    while scores[token] < row.best:
        token += 1
    return token


@kernel
def draw(row, room):
    """Return the first token at which the cumulative mass exceeds `uniform` of the whole."""
    masses, own = floats_at(row.masses, row.chunks), floats_at(room, CHUNK)
    target, before, chunk = lesser(row.uniform, _BELOW_ONE) * row.mass, 0.0, 0
    while chunk < row.chunks - 1 and before + masses[chunk] <= target:
        before += masses[chunk]
        chunk += 1
    how = reading(row)
    for i in range(0, CHUNK_BYTES, VECTOR_BYTES):
        store(room + i, weight(relative(how, load(row.scores + chunk * CHUNK_BYTES + i))))
    last = 0
    for i in range(CHUNK):
        if own[i] > 0.0:
            last = i
            before += own[i]
            if before > target:
                break
    # A chunk's float32 mass may be a little more than its parts: then its last token is taken.
    return chunk * CHUNK + last


@kernel
def leave_out(row):
    """Write an outcome for a row from which nothing can be chosen: its best score is not finite."""
    row.mass, row.entropy, row.token, row.score = 1.0, 0.0, 0, 0.0
    if row.width:
        keys = ints_at(row.keys, row.width)
        for i in range(row.width):
            keys[i] = i


@kernel
def work_on(row, room):
    """Choose a row's token and write all requested results."""
    if row.allowed:
        mask(row)
    if row.truncates and np.isfinite(row.best):
        truncate(row, room)
    if row.finds_best:
        row.best = find_maxima(row)
    if not np.isfinite(row.best):
        leave_out(row)
        return
    if row.weighs:
        row.mass, row.entropy = measure(row, row.weighs == 2, np.int64(0))
    if row.picks:
        row.token = draw(row, room) if row.picks == 2 else first_best(row)
        scores = floats_at(row.scores, row.chunks * CHUNK)
        row.score = relative_one(row, scores[row.token])
    if row.width:
        find_candidates(row, row.width)


@entry
def work_on_rows(rows, count, counter, room):
    """Process `count` ROWs at an address, together with other threads that share them.

    `counter`: address of the number of rows taken so far, an int64. `room`: this thread's scratch
    memory, of `scratch_memory.sampler_bytes` bytes.
    """
    i = atomic_add(counter, 1)
    while i < count:
        work_on(row_at(rows + i * ROW_BYTES), room)
        i = atomic_add(counter, 1)
