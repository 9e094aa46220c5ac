"""Random numbers as a pure function of (seed, position): Philox4x32-10.

No state is kept, so a sequence draws the same numbers alone, in any batch, after a preemption and
after its shard was replaced. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 4 random 32-bit words per column: uint64 [4, N] from counter [4, N] and key [2, N].

    All words are 32-bit values held in uint64.
    """
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS
        even, odd = (product[::-1] >> _HALF) ^ odd ^ key, product[::-1] & _LOW
        key = (key + _KEY_STEPS) & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position), with 53 random bits: float64 [N].

    `positions` is the index in its sequence of the token to be chosen.
    """
    counter = np.zeros((4, len(seeds)), np.uint64)
    counter[0], counter[1] = positions & _LOW, positions >> _HALF
    words = philox(counter, np.stack((seeds & _LOW, seeds >> _HALF)))
    numbers: NDArray[np.float64] = ((words[0] << _HALF | words[1]) >> np.uint64(11)) * 2.0**-53
    return numbers
