"""The beginning of a random permutation: a partial Fisher-Yates shuffle."""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import entry
from tgi_trio.shard.cpu_backend.kernels.arrays import ints_at


@entry
def shuffle(ids_at, size, draws_at, count):
    """Move a random choice of `ids` int64 [size] to the front, as many as there are draws.

    `draws_at`: int64 [count], not negative; fewer than `size`.
    """
    ids, draws = ints_at(ids_at, size), ints_at(draws_at, count)
    for i in range(count):
        other = i + draws[i] % (size - i)
        taken = ids[other]
        ids[other] = ids[i]
        ids[i] = taken
