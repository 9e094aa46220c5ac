"""Kimi K2.5: what an image is resized to, and how much of nothing is added to it.

For who counts its tokens, and for who makes its pixels. Source: `transformers`' image processor of
this family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Self

from tgi_trio.media.canvases import TileGrid, check_counts


@dataclass(frozen=True, slots=True)
class KimiCanvas:
    """What a model's files say of it."""

    patch: int  # pixels, a side
    merge: int  # patches of a side of what becomes one feature
    most: int  # patches of an image
    most_of_side: int

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Return what the settings of an image processor say; raises ModelLoadError."""
        size = settings.get("size") or {"max_height": 512, "max_width": 512}
        shape = size if isinstance(size, Mapping) else {}
        found = {
            "patch_size": settings.get("patch_size", 14),
            "merge_size": settings.get("merge_size", 2),
            "max_patches": settings.get("max_patches", 16384),
            "max_height of size": shape.get("max_height"),
        }
        check_counts(found)
        return cls(*found.values())

    def shrink(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width, in pixels, of what an image is resized to: never more."""
        patches = max(1, height // self.patch) * max(1, width // self.patch)
        most = self.most_of_side * self.patch
        scale = min(1.0, sqrt(self.most / patches), most / height, most / width)
        high, wide = (min(max(1, int(side * scale)), most) for side in (height, width))
        return high, wide

    def count_units(self, height: int, width: int) -> TileGrid:
        """Return rows and columns of features, the last of which may see nothing in part."""
        unit = self.patch * self.merge
        high, wide = (-(-side // unit) for side in self.shrink(height, width))
        return TileGrid(high, wide)
