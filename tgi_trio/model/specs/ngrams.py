"""N-gram embeddings of a layer: hashes of a token and those before it choose rows of a table.

Source: Qwen 4 (2026), "per-layer embeddings". No torch in this file, since every backend reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import isqrt
from typing import Final

from tgi_trio.model.specs.mixers import StateShape

_LARGEST: Final = (1 << 63) - 1  # of the products that are hashed
_WORD: Final = (1 << 64) - 1
# SplitMix64 (Steele, Lea, Flood 2014), which draws the factors.
_STEP: Final = 0x9E3779B97F4A7C15
_MIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_APART: Final = 10007  # between the seeds of two layers


@dataclass(frozen=True, slots=True)
class NgramsSpec:
    """The n-grams of 2 to `order` tokens that end in a token, each hashed by several heads.

    A head's hash of n tokens is the XOR of each token times its factor, modulo the head's rows; an
    n-gram does not reach over an end of text. The rows found are joined, and projected to one value
    and a key for each hidden state, whose product with the key gates the value. What that gives is
    added to the hidden states, with a convolution of it over every `order`-th token.
    """

    order: int
    factors: tuple[int, ...]  # of a token, of the one before it, ...
    rows: tuple[int, ...]  # of each head's part of the table: those of 2-grams first
    table_rows: int  # of the table, with its padding
    parts: int  # the tensors that the table is stored in, with consecutive rows; 0: one
    width: int  # of a token's embedding: all heads together
    taps: int  # of the convolution
    end: int  # the token that ends a text
    channels: int  # of all hidden states together

    @property
    def heads(self) -> int:
        return len(self.rows)

    @property
    def firsts(self) -> tuple[int, ...]:
        """Return the first row of each head."""
        return (0, *accumulate(self.rows[:-1]))

    @property
    def part_rows(self) -> tuple[int, ...]:
        """Return the rows of each tensor of the table."""
        each = -(-self.table_rows // max(1, self.parts))
        full, rest = divmod(self.table_rows, each)
        return (each,) * full + ((rest,) if rest else ())

    def state_shapes(self) -> tuple[StateShape, ...]:
        """Return the state, which every rank has: the last tokens, and inputs of the convolution.

        Oldest first.
        """
        before = (self.taps - 1) * self.order
        return (
            StateShape("tokens", (self.order - 1,), "token"),
            StateShape("ngrams", (before, self.channels), "model"),
        )


def draw_factors(vocabulary: int, order: int, layer: int, seed: int) -> tuple[int, ...]:
    """Return the factors of tokens: odd, and so small that no product overflows 63 bits.

    `layer`: its number among those with n-grams.
    """
    bound = max(1, _LARGEST // max(1, vocabulary) // 2)
    start = seed + _APART * layer
    return tuple(2 * (_draw(start + _STEP * (i + 1)) % bound) + 1 for i in range(order))


def _draw(state: int) -> int:
    """Return the number that SplitMix64 draws in a state, after which it has moved on."""
    value = (state + _STEP) & _WORD
    for shift, factor in _MIX:
        value = ((value ^ (value >> shift)) * factor) & _WORD
    return value ^ (value >> 31)


@lru_cache(maxsize=64)  # a model's layers with n-grams ask for few
def find_primes(least: int, skipped: int, count: int) -> tuple[int, ...]:
    """Return `count` primes from `least` on, behind the first `skipped` ones."""
    found: list[int] = []
    at = max(2, least)
    while len(found) < skipped + count:
        if all(at % divisor for divisor in range(2, isqrt(at) + 1)):
            found.append(at)
        at += 1
    return tuple(found[skipped:])
