"""Sparse attention by blocks of tokens. Literal data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockIndexSpec:
    """An index that chooses the blocks of preceding tokens to which a token attends.

    It has a query head for each KV head, which chooses for the query heads that share it; all score
    the same key of a token, and a block by its best token. Its heads are normalised and rotated as
    those of attention are. The blocks that end with the token's own are among the chosen. Source:
    MiniMax-M3 (2026).
    """

    dim: int  # of a query and of the key
    size: int  # tokens of a block; the first block begins at position 0
    most: int  # blocks that are attended to
    local: int  # of which so many are the last ones
