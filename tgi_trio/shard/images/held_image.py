"""An image of a sequence with its features. No torch in this file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.images.features import ImageFeatures
from tgi_trio.shard.placed_features import PlacedFeatures


@dataclass(frozen=True, slots=True, eq=False)
class HeldImage:
    """Features, and where they stand."""

    positions: NDArray[np.int64]  # [N] in the sequence, rising
    features: ImageFeatures
    # Where layers attend to it: the position from which on no token sees it; None: there is none.
    until: int | None = None

    @property
    def end(self) -> int:
        """Position behind the last feature."""
        return int(self.positions[-1]) + 1 if len(self.positions) else 0

    def between(self, first: int, end: int) -> PlacedFeatures | None:
        """Return those at positions `first` up to `end`, counted from `first`; views.

        None where there are none, or layers attend to them.
        """
        own = self.features
        if own.states is not None:
            return None
        return PlacedFeatures(self.positions, own.rows, own.deep).between(first, end)


def place_features(parts: list[tuple[int, PlacedFeatures]]) -> PlacedFeatures | None:
    """Return features of a step: each part's places are counted from a token of the step.

    `parts` in the order of the tokens. None where there are none.
    """
    if not parts:
        return None
    deep = zip(*(part.deep for _, part in parts), strict=True)
    return PlacedFeatures(
        np.concatenate([part.places + start for start, part in parts]),
        np.concatenate([part.rows for _, part in parts]),
        tuple(np.concatenate(rows) for rows in deep),
    )
