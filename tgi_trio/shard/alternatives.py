"""Alternatives: the likeliest tokens reported beside chosen ones. No torch here."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Alternatives: TypeAlias = ListLike[tuple[int, float]]  # (id, logprob), best first


@dataclass(slots=True)
class Listed:
    """The alternatives of N tokens as columns, token after token."""

    counts: NDArray[np.int64]  # [N]
    token_ids: NDArray[np.integer[Any]]  # [the sum of them], each token's best first
    logprobs: NDArray[np.floating[Any]]  # the same

    @classmethod
    def none(cls, tokens: int) -> Listed:
        """Return the alternatives of tokens that have none."""
        return cls(np.zeros(tokens, np.int64), np.empty(0, np.int64), np.empty(0))

    @classmethod
    def of(cls, each: ListLike[Alternatives]) -> Listed:
        """Return tokens' alternatives as columns."""
        counts = np.array([len(some) for some in each], np.int64)
        flat = np.array([pair for some in each for pair in some], np.float64).reshape(-1, 2)
        return cls(counts, flat[:, 0].astype(np.int64), flat[:, 1])

    @property
    def each(self) -> list[list[tuple[int, float]]]:
        """Return the columns token by token."""
        pairs = list(zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True))
        ends = np.cumsum(self.counts).tolist()
        return [pairs[end - n : end] for end, n in zip(ends, self.counts.tolist(), strict=True)]

    def kept(self, which: NDArray[np.bool_]) -> Listed:
        """Return those of the tokens `which` [N] says."""
        own = np.repeat(which, self.counts)
        return Listed(self.counts[which], self.token_ids[own], self.logprobs[own])
