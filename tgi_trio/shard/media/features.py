"""Features of media, and a cache of them by content. No torch in this file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bundle = Mapping[str, NDArray[Any]]  # arrays of an image by name, as `ipc.images` has them


@dataclass(frozen=True, slots=True, eq=False)
class CrossStates:
    """An image's keys and values for text layers with cross-attention, computed once.

    For each such layer torch tensors [S, KV heads, head dim], on rank 0 in the host's memory. On
    the other ranks there are no tensors until rank 0 sends them.
    """

    keys: Sequence[Any]
    values: Sequence[Any]
    tokens: int  # S
    visible: int  # of S: those after them belong to tiles that are padding
    number: int = 0  # of the image, counted over all that a tower has encoded

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.keys, *self.values))


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """One image's N features, in the order of their tokens."""

    rows: NDArray[np.float32]  # [N, hidden of the text model]
    # By text layer, [N, hidden]: added to hidden states after that layer.
    deep: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    # For layers with cross-attention; there are no rows then.
    states: CrossStates | None = None

    @property
    def nbytes(self) -> int:
        states = 0 if self.states is None else self.states.nbytes
        return self.rows.nbytes + sum(rows.nbytes for rows in self.deep.values()) + states


class ImageEncoder(Protocol):
    """A model's vision tower and projector."""

    def encode(self, bundle: Bundle) -> ImageFeatures:
        """Return the features of an image, by a whole forward pass of the tower.

        Raises ValueError for a bundle that does not fit the model.
        """
        ...


class FeatureStore:
    """An LRU cache of features by images' keys, bounded in bytes."""

    def __init__(self, most: int) -> None:
        """`most`: limit of the features' total size, in bytes."""
        self._most = most
        self._kept: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self.nbytes = 0

    def find(self, key: bytes) -> ImageFeatures | None:
        """Return an image's features if cached, and mark them as the most recently used."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: bytes, features: ImageFeatures) -> None:
        """Cache an image's features, unless they alone exceed the limit."""
        if features.nbytes > self._most or key in self._kept:
            return
        self._kept[key] = features
        self.nbytes += features.nbytes
        while self.nbytes > self._most:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= dropped.nbytes
