"""Phi-4-multimodal: the crops of an image, and how much of them it fills.

For who counts its tokens, and for who makes its pixels. Source: `transformers`' image processor of
this family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.canvases import TileGrid

SIDE: Final = 448  # pixels of a crop
PATCH: Final = 14  # pixels of a patch, of which two by two become a feature
PATCHES: Final = SIDE // PATCH  # of a crop's side
WHOLE: Final = (PATCHES // 2) ** 2 + PATCHES // 2  # features of the view of the whole, and row ends
_NARROWEST: Final = 10  # pixels of a side, once the image is resized
_MOST: Final = 36  # crops


@dataclass(frozen=True, slots=True)
class Phi4Cut:
    """How one image is cut: it lies at the upper left of its crops, and white around it."""

    height: int  # to which it is resized
    width: int
    grid: TileGrid  # of crops
    seen: tuple[int, int]  # rows and columns of patches that are seen of all crops together

    @property
    def features(self) -> tuple[int, int]:
        """Rows and columns of features that are read of the crops."""
        rows, columns = self.seen
        return -(-rows // 2), -(-columns // 2)


@dataclass(frozen=True, slots=True)
class Phi4Canvas:
    """What a model's files say of it."""

    most: int  # crops; an image that would have more keeps its proportions as it can

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Return what the settings of an image processor say; raises ModelLoadError."""
        size = settings.get("size") or {"height": SIDE, "width": SIDE}
        patch, most = settings.get("patch_size", PATCH), settings.get("dynamic_hd", _MOST)
        if size != {"height": SIDE, "width": SIDE} or patch != PATCH:
            raise ModelLoadError(
                f"its image processor says size {size} and patch_size {patch}; served are crops of "
                f"{SIDE} pixels and patches of {PATCH}, of all such models"
            )
        if not isinstance(most, int) or isinstance(most, bool) or most <= 0:
            raise ModelLoadError(f"dynamic_hd must be a positive number, not {most!r}")
        return cls(most)

    def cut(self, height: int, width: int) -> Phi4Cut:
        """Return how an image of this size is cut; raises ValueError for one that is too narrow."""
        grid = TileGrid(-(-height // SIDE), -(-width // SIDE))
        if grid.tiles > self.most:
            grid = self._find_closest(height, width)
        room = grid.rows * SIDE, grid.columns * SIDE
        by_width, by_height = room[1] / width, room[0] / height
        size = room[0], int(width * by_height)
        if by_width < by_height:
            size = int(height * by_width), room[1]
        if min(size) < _NARROWEST:
            raise ValueError(
                f"it would be of {size[1]} x {size[0]} pixels for this model, which takes none "
                f"with less than {_NARROWEST}"
            )
        seen = tuple(
            side // PATCH - (side - own) // PATCH for side, own in zip(room, size, strict=True)
        )
        return Phi4Cut(*size, grid, (seen[0], seen[1]))

    def _find_closest(self, height: int, width: int) -> TileGrid:
        """Return the grid whose proportions are the nearest to an image's."""
        most, best, least = self.most, TileGrid(1, 1), math.inf
        # Of grids with as many crops and proportions as near, transformers takes the one that its
        # set yields last: so this is the same one.
        pairs = {
            (i, j)
            for n in range(1, most + 1)
            for i in range(1, n + 1)
            for j in range(1, n + 1)
            if i * j <= most
        }
        for columns, rows in sorted(pairs, key=lambda pair: pair[0] * pair[1]):
            apart = abs(width / height - columns / rows)
            large = width * height > 0.5 * SIDE * SIDE * columns * rows
            if apart < least or (apart == least and large):
                best, least = TileGrid(rows, columns), apart
        return best
