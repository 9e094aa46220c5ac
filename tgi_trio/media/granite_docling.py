"""Granite Docling: the grid of tiles that a page is cut into.

Source: `transformers`' image processor of this family, which makes the pixels as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.canvases import (
    ONE_TILE,
    TileGrid,
    check_counts,
    check_tiles,
    fit_nearest,
    read_square,
)

_LONGEST_SIDE: Final = 16  # tiles: there are marks for no more


@dataclass(frozen=True, slots=True)
class GraniteDoclingCanvas:
    """What a model's files say of it."""

    tile: int  # side, in pixels
    least: int  # tiles
    most: int
    dense_most: int  # tiles of a page that is wide, and would be shrunk; 0: it is as others
    dense_scale: float  # over a page's width, below which a grid's shrinks it; 0: any is
    dense_least_ratio: float  # a page's width over its height, beyond which it is wide; 0: any is
    dense_most_ratio: float  # up to which; 0: any is

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Return what the settings of an image processor say; raises ModelLoadError."""
        tile = read_square(settings, 512)
        found = {
            "min_patches": settings.get("min_patches", 1),
            "max_patches": settings.get("max_patches", 32),
        }
        check_counts(found)
        names = ("dense_max_scale", "dense_min_aspect", "dense_max_aspect")
        told = [settings.get(name, 0.0) for name in names]
        dense = settings.get("dense_max_patches", 0)
        for name, value in zip((*names, "dense_max_patches"), (*told, dense), strict=True):
            if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
                raise ModelLoadError(f"{name} must be a number from 0, not {value!r}")
        if not isinstance(dense, int):
            raise ModelLoadError(f"dense_max_patches must be a whole number, not {dense!r}")
        least, most = found.values()
        most = most if settings.get("crop_to_patches", True) else 1
        check_tiles(max(most, dense))
        return cls(tile, least, most, dense if most > 1 else 0, *map(float, told))

    def cut(self, height: int, width: int) -> TileGrid:
        """Return the grid of tiles of a page of this size."""
        most = self.dense_most if self._is_dense(height, width) else self.most
        return self._fit(height, width, most)

    def _is_dense(self, height: int, width: int) -> bool:
        if not self.dense_most or not (self.dense_scale or self.dense_least_ratio):
            return False
        ratio = width / height
        if self.dense_least_ratio and ratio <= self.dense_least_ratio:
            return False
        if self.dense_most_ratio and ratio > self.dense_most_ratio:
            return False
        if not self.dense_scale:
            return True
        return self._fit(height, width, self.most).columns * self.tile / width < self.dense_scale

    def _fit(self, height: int, width: int, most: int) -> TileGrid:
        """Return the grid of at most so many tiles that is nearest to a page's proportions."""
        if most <= 1:
            return ONE_TILE
        sides = range(1, min(most, _LONGEST_SIDE) + 1)
        every = (TileGrid(rows, columns) for columns in sides for rows in sides)
        grids = [grid for grid in every if self.least <= grid.tiles <= most]
        return fit_nearest(height, width, self.tile, sorted(grids, key=lambda grid: grid.tiles))
