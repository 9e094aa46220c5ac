"""An image, a video or a sound of a sequence with its features. No torch in this file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.media.features import ImageFeatures
from tgi_trio.shard.media.placed_features import PlacedFeatures


@dataclass(frozen=True, slots=True, eq=False)
class HeldImage:
    """An image's features and their positions."""

    positions: NDArray[np.int64]  # [N] in the sequence, rising
    features: ImageFeatures
    # For layers with cross-attention: from this position on, no token sees it; None: all do.
    until: int | None = None

    @property
    def end(self) -> int:
        """Position after the last feature."""
        return int(self.positions[-1]) + 1 if len(self.positions) else 0

    def between(self, first: int, end: int) -> PlacedFeatures | None:
        """Return the features at positions `first` up to `end`, relative to `first`, as views.

        None if there are none, or for layers with cross-attention.
        """
        own = self.features
        if own.states is not None:
            return None
        return PlacedFeatures(self.positions, own.rows, own.deep).between(first, end)


def place_features(parts: list[tuple[int, PlacedFeatures]]) -> PlacedFeatures | None:
    """Return the features of a step, from parts with places relative to a token of it.

    `parts` are in the order of the tokens; those of sounds add nothing after layers, where those of
    images do. None if there are no parts.
    """
    if not parts:
        return None
    layers = dict.fromkeys(layer for _, part in parts for layer in part.deep)
    deep = {
        layer: np.concatenate([part.deep.get(layer, np.zeros_like(part.rows)) for _, part in parts])
        for layer in layers
    }
    return PlacedFeatures(
        np.concatenate([part.places + start for start, part in parts]),
        np.concatenate([part.rows for _, part in parts]),
        deep,
    )
