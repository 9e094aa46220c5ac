"""LFM2-VL: the tiles that an image is cut into, and how much the whole of it is shrunk.

For who counts its tokens, and for who makes its pixels. Source: `transformers`' image processor of
this family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Any, Self

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.canvases import ONE_TILE, TileGrid, check_counts, check_tiles, fit_nearest


@dataclass(frozen=True, slots=True)
class Lfm2Canvas:
    """What a model's files say of it. A *unit* is what one feature sees."""

    patch: int  # pixels, the side of what the tower reads at once
    unit: int  # pixels, a multiple of that
    least: int  # units of the whole image
    most: int
    tile: int  # pixels, a tile's side: a multiple of a unit
    grids: tuple[TileGrid, ...]  # that large images may be cut into; none: they are not cut
    tolerance: float  # how many times `most` units an image has before it is cut
    shows_whole: bool  # behind its tiles

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Return what the settings of an image processor say; raises ModelLoadError."""
        patch = _read_count(settings, "encoder_patch_size", 16)
        unit = patch * _read_count(settings, "downsample_factor", 2)
        tile = _read_count(settings, "tile_size", 512)
        grids: tuple[TileGrid, ...] = ()
        if settings.get("do_image_splitting", True):
            least = _read_count(settings, "min_tiles", 2)
            most = _read_count(settings, "max_tiles", 10)
            if least > most:
                raise ModelLoadError(f"min_tiles {least} is more than max_tiles {most}")
            grids = list_grids(least, most) if most > 1 else ()
        if tile % unit:
            raise ModelLoadError(f"tile_size {tile} is no multiple of {unit}, what a feature sees")
        tolerance = settings.get("max_pixels_tolerance", 2.0)
        if not isinstance(tolerance, int | float) or not tolerance >= 0:
            raise ModelLoadError(f"max_pixels_tolerance must be a number, not {tolerance!r}")
        return cls(
            patch=patch,
            unit=unit,
            least=_read_count(settings, "min_image_tokens", 64),
            most=_read_count(settings, "max_image_tokens", 256),
            tile=tile,
            grids=grids,
            tolerance=tolerance,
            shows_whole=bool(settings.get("use_thumbnail", True)),
        )

    @property
    def units_of_tile(self) -> int:
        """How many features a tile has."""
        return (self.tile // self.unit) ** 2

    def cut(self, height: int, width: int) -> TileGrid:
        """Return rows and columns of an image's tiles.

        One that is not cut has one of each. So does one of a single tile, where files allow that:
        `transformers` makes a tile of it and counts the tokens of the whole, and fails.
        """
        high, wide = (max(self.patch, self.unit * round(n / self.unit)) for n in (height, width))
        if not self.grids or high * wide <= self.most * self.unit**2 * self.tolerance:
            return ONE_TILE
        return fit_nearest(height, width, self.tile, self.grids)

    def count_units(self, height: int, width: int) -> TileGrid:
        """Return rows and columns of features of the whole image."""
        rows, columns = (max(1, round(side / self.unit)) for side in (height, width))
        if rows * columns > self.most:
            shrink = sqrt(height * width / (self.most * self.unit**2))
            rows, columns = (max(1, floor(n / shrink / self.unit)) for n in (height, width))
        elif rows * columns < self.least:
            grow = sqrt(self.least * self.unit**2 / (height * width))
            rows, columns = (ceil(side * grow / self.unit) for side in (height, width))
        return TileGrid(rows, columns)


def list_grids(least: int, most: int) -> tuple[TileGrid, ...]:
    """Return all grids of so many tiles; raises ValueError as `check_tiles`.

    Of as many tiles they are in the order of a set, as `transformers` has them: an image that is as
    near to two of them gets the last.
    """
    check_tiles(most)
    pairs = [
        (columns, rows)
        for count in range(least, most + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if least <= columns * rows <= most
    ]
    ordered = sorted(set(pairs), key=lambda pair: pair[0] * pair[1])
    return tuple(TileGrid(rows, columns) for columns, rows in ordered)


def _read_count(settings: Mapping[str, Any], key: str, default: int) -> int:
    found = settings.get(key)
    if found is None:
        return default
    check_counts({key: found})
    return int(found)
