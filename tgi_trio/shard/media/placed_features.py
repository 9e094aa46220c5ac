"""Features of media in a step: which tokens have them in place of embeddings, and their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PlacedFeatures:
    """The features that replace the embeddings of N of a step's query tokens.

    They are in the host's memory, whatever the device, and not scaled: a model that scales its
    embeddings does so before they are overwritten.
    """

    places: NDArray[np.int64]  # [N] which of the step's T tokens, ascending
    rows: NDArray[np.float32]  # [N, hidden]
    # By text layer, [N, hidden]: added to the hidden state at the same tokens after that layer.
    deep: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)

    def between(self, first: int, last: int) -> PlacedFeatures | None:
        """Return the features of tokens `first` to `last`, with places from `first` on; views."""
        start, stop = np.searchsorted(self.places, (first, last)).tolist()
        if start == stop:
            return None
        deep = {layer: rows[start:stop] for layer, rows in self.deep.items()}
        return PlacedFeatures(self.places[start:stop] - first, self.rows[start:stop], deep)

    def kept(self, tokens: NDArray[np.bool_]) -> PlacedFeatures | None:
        """Return the features of the tokens kept by the mask `tokens` [T], renumbered."""
        mine = tokens[self.places]
        if not mine.any():
            return None
        places = np.cumsum(tokens)[self.places[mine]] - 1
        deep = {layer: rows[mine] for layer, rows in self.deep.items()}
        return PlacedFeatures(places, self.rows[mine], deep)
