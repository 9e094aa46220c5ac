"""Rows of a step whose embeddings are an image's features: which tokens, and what they get."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PlacedFeatures:
    """N of a step's query tokens and the features that stand in the places of their embeddings.

    They are in the host's memory whatever the device is, and not scaled: a model that scales its
    embeddings has scaled them before they are overwritten.
    """

    places: NDArray[np.int64]  # [N] which of the step's T tokens, ascending
    rows: NDArray[np.float32]  # [N, hidden]
    # Each [N, hidden], added to the hidden state at the same tokens after text layers 0, 1, ...
    deep: tuple[NDArray[np.float32], ...] = ()

    def between(self, first: int, last: int) -> PlacedFeatures | None:
        """Return those of tokens `first` up to `last`, counted from `first`; views."""
        start, stop = np.searchsorted(self.places, (first, last)).tolist()
        if start == stop:
            return None
        deep = tuple(rows[start:stop] for rows in self.deep)
        return PlacedFeatures(self.places[start:stop] - first, self.rows[start:stop], deep)

    def kept(self, tokens: NDArray[np.bool_]) -> PlacedFeatures | None:
        """Return those of the tokens that `tokens` [T] keeps, counted among the kept."""
        mine = tokens[self.places]
        if not mine.any():
            return None
        places = np.cumsum(tokens)[self.places[mine]] - 1
        return PlacedFeatures(places, self.rows[mine], tuple(rows[mine] for rows in self.deep))
