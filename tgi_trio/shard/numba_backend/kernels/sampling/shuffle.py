"""The beginning of a random permutation: Fisher and Yates' shuffle, as far as it is wanted."""

from __future__ import annotations

from tgi_trio.shard.numba_backend.kernels import entry


@entry
def shuffle(ids, draws):
    """Put a random choice of `ids` [N] in front, as many as there are `draws` (uint32 [< N])."""
    for i in range(len(draws)):
        other = i + draws[i] % (len(ids) - i)
        taken = ids[other]
        ids[other] = ids[i]
        ids[i] = taken
