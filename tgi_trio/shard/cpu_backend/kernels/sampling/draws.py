"""The random numbers of `shard/sampling/philox.py`, to the bit.

numpy takes 100 us for a handful of rows.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import entry
from tgi_trio.shard.cpu_backend.kernels.arrays import doubles_at, words_at

_ROUNDS = 10
_FIRST, _SECOND = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)  # multipliers
# added to the key in each round
_FIRST_STEP, _SECOND_STEP = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF, _SPARE = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(11)


@entry
def draw_uniforms(seeds_at, positions_at, numbers_at, count):
    """Write a number in [0, 1) per (seed, position); uint64 [N], uint64 [N], float64 [N]."""
    seeds, positions = words_at(seeds_at, count), words_at(positions_at, count)
    numbers = doubles_at(numbers_at, count)
    for i in range(count):
        a, b = positions[i] & _LOW, positions[i] >> _HALF
        c = d = np.uint64(0)
        key, other = seeds[i] & _LOW, seeds[i] >> _HALF
        for _ in range(_ROUNDS):
            one, two = a * _FIRST, c * _SECOND
            a, b = (two >> _HALF) ^ b ^ key, two & _LOW
            c, d = (one >> _HALF) ^ d ^ other, one & _LOW
            key, other = (key + _FIRST_STEP) & _LOW, (other + _SECOND_STEP) & _LOW
        numbers[i] = np.float64((a << _HALF | b) >> _SPARE) * 2.0**-53
