"""Sparse attention by blocks of tokens, each with one index key. Literal data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PooledIndexSpec:
    """An index that chooses whole blocks of preceding tokens, for all heads alike.

    A block's key is the norm of its tokens' mean, rotated as its first token is; a score is the sum
    over heads of the positive part of query . key. The tokens since the last whole block are
    attended to as well. Source: Qwen 4 (2026).
    """

    heads: int
    dim: int  # of each query and of the key
    size: int  # tokens of a block; the first block begins at position 0
    most: int  # blocks that are attended to
