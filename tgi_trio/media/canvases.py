"""Which grid of tiles an image fills: for who counts its tokens, and for who makes its pixels.

Sources: `transformers`' image processors of these families.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, product
from math import ceil, floor, sqrt
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError


class TileGrid(NamedTuple):
    """Rows and columns of tiles."""

    rows: int
    columns: int

    @property
    def tiles(self) -> int:
        return self.rows * self.columns


MOST_TILES: Final = 256  # published models have up to 40
ONE_TILE: Final = TileGrid(1, 1)  # of an image that is not cut
_ENOUGH: Final = 0.9  # of an image's pixels


def check_counts(settings: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a setting, by its name, that is no positive whole number."""
    for name, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelLoadError(f"{name} must be a positive number, not {value!r}")


def read_square(settings: Mapping[str, Any], default: int) -> int:
    """Return the side of the square that `size` says; `default`: where it is absent.

    Raises ModelLoadError for a size that is none.
    """
    size = settings.get("size") or {"height": default, "width": default}
    shape = size if isinstance(size, Mapping) else {}
    side: Any = shape.get("height")
    check_counts({"size": side})
    if shape.get("width") != side:
        raise ModelLoadError(f"size must be of one height and width, not {size!r}")
    return int(side)


def check_tiles(most: int) -> None:
    """Raise ValueError for more tiles than an image is cut into: grids of them are tried for each
    image, one after the other.
    """
    if most > MOST_TILES:
        raise ValueError(f"images would be cut into up to {most} tiles, more than {MOST_TILES}")


def list_grids(most: int) -> list[TileGrid]:
    """Return all grids of at most so many tiles; raises ValueError as `check_tiles`."""
    check_tiles(most)
    sides = range(1, most + 1)
    return [TileGrid(r, c) for r in sides for c in sides if r * c <= most]


def fit_llama4(height: int, width: int, tile: int, most: int, largest: bool) -> TileGrid:
    """Return Llama 4's grid: one that an image need not shrink for, else it shrinks least.

    Of those the least enlarging, or with `largest` the most; of equals the one of fewest tiles.
    Scales are compared as the float32 that they are in `transformers`.
    """
    # Its order, by the number of tiles from the most: the first of equals is taken.
    grids = sorted(list_grids(most), key=lambda grid: (-grid.tiles, grid.rows))
    scales = _scales(grids, tile, np.array([height, width], np.float32))
    enlarging = scales[scales >= 1]
    scale = enlarging.min() if len(enlarging) and not largest else scales.max()
    fitting = [grid for grid, each in zip(grids, scales, strict=True) if each == scale]
    return min(fitting, key=lambda grid: grid.tiles)


def fit_cohere2(height: int, width: int, tile: int, most: int) -> TileGrid:
    """Return Command A Vision's grid: likewise, the first of equals, from the fewest tiles."""
    grids = sorted(list_grids(most), key=lambda grid: (grid.tiles, grid.columns))
    scales = _scales(grids, tile, np.array([height, width], np.float64))
    if (scales < 1).all():
        return grids[int(scales.argmax())]
    return grids[int(np.where(scales < 1, np.inf, scales).argmin())]


def fit_internvl(height: int, width: int, tile: int, least: int, most: int) -> TileGrid:
    """Return InternVL's grid, which is Aya Vision's too: the one nearest to an image's proportions.

    Of equals the one of most tiles, as long as the image has more than half of their pixels.
    """
    grids = [grid for grid in list_grids(most) if grid.tiles >= least]
    return fit_nearest(
        height, width, tile, sorted(grids, key=lambda grid: (grid.tiles, grid.columns))
    )


def fit_nearest(height: int, width: int, tile: int, grids: Iterable[TileGrid]) -> TileGrid:
    """Return the grid that is nearest to an image's proportions, 1 x 1 where there is none.

    Of equals the last, as long as the image has more than half of its pixels.
    """
    best, nearest = ONE_TILE, np.inf
    for grid in grids:
        off = abs(width / height - grid.columns / grid.rows)
        if off < nearest or (off == nearest and height * width > 0.5 * tile**2 * grid.tiles):
            best, nearest = grid, off
    return best


def fit_ovis2(height: int, width: int, tile: int, most: int) -> TileGrid:
    """Return Ovis 2's grid: of the fewest tiles that show 9 of 10 pixels at their own size.

    Of equals the one that shows most; if there is none, that of all. As in `transformers`, what is
    counted is the grid with its sides exchanged.
    """

    def show(grid: TileGrid) -> float:
        return sum(_shown(*part, tile) for part in _cut(height, width, grid)) / (width * height)

    # Its order: of these the first of equals is taken.
    grids = sorted(list_grids(most), key=lambda grid: grid.tiles)
    shown = {grid: show(grid) for grid in grids}
    enough = [grid for grid in grids if shown[grid] > _ENOUGH]
    if enough:
        best = min(enough, key=lambda grid: (grid.tiles, -shown[grid]))
    else:
        best = min(grids, key=lambda grid: (-shown[grid], grid.tiles))
    return TileGrid(best.columns, best.rows)


def _cut(height: int, width: int, grid: TileGrid) -> Iterator[tuple[int, int]]:
    """Yield height and width of the parts of an image: the last of a row or column has the rest."""
    high, wide = height // grid.rows, width // grid.columns
    for row, column in product(range(1, grid.rows + 1), range(1, grid.columns + 1)):
        yield (
            height - high * (row - 1) if row == grid.rows else high,
            width - wide * (column - 1) if column == grid.columns else wide,
        )


def _shown(height: int, width: int, tile: int) -> float:
    """Return how many pixels a part has when it is shrunk into a tile's side."""
    longer, shorter = max(height, width), min(height, width)
    return shorter / longer * tile * tile if longer > tile else longer * shorter


def fit_perception(height: int, width: int, tile: int, most: int) -> TileGrid:
    """Return Perception LM's grid: one that an image need not shrink for, where it is largest.

    Of equals the last in the order of `transformers`. If there is none, the largest of those that
    are nearest to its proportions, and not longer than these.
    """
    ratio = width / height
    grids: dict[float, list[TileGrid]] = {}  # by their own proportions
    check_tiles(most)
    for count in range(most, 0, -1):
        for columns in (c for c in range(1, count + 1) if count % c == 0):
            grid = TileGrid(count // columns, columns)
            grids.setdefault(grid.columns / grid.rows, []).append(grid)

    def shown(grid: TileGrid) -> float:
        """Return the shorter side of the image in a grid, in pixels."""
        scale = min(grid.columns * tile / width, grid.rows * tile / height)
        if ratio > 1:
            return floor(scale * width / ratio)
        return floor(scale * height * ratio) if ratio < 1 else scale * height

    room = [
        grid
        for grid in chain.from_iterable(grids.values())
        if grid.columns * tile >= width and grid.rows * tile >= height
    ]
    if room:
        return max(reversed(room), key=shown)
    if ratio >= 1:
        nearest = max(own for own in grids if own <= ratio)
        return max(grids[nearest], key=lambda grid: grid.columns)
    nearest = min((own for own in grids if own > ratio), key=lambda own: abs(1 / own - 1 / ratio))
    return max(grids[nearest], key=lambda grid: grid.rows)


def fit_gemma4(height: int, width: int, unit: int, most: int) -> TileGrid:
    """Return Gemma 4's grid: of as many units of so many pixels as a limit allows.

    In the image's own proportions; a side that would vanish has one. Raises ValueError if nothing
    is left of it.
    """
    scale = sqrt(most * unit**2 / (height * width))
    rows, columns = (floor(scale * side / unit) for side in (height, width))
    if not rows and not columns:
        raise ValueError("nothing is left of the image at this model's size")
    if not rows:
        return TileGrid(1, min(width // height, most))
    if not columns:
        return TileGrid(min(height // width, most), 1)
    return TileGrid(rows, columns)


def fit_muse(height: int, width: int, unit: int, most: int) -> TileGrid:
    """Return Muse Glimmer's grid: of units of so many pixels, at most so many.

    Of the sizes around an image's own, or around the largest of its proportions, the nearest to
    these; of equals the first in the order of a set, as `transformers` has them.
    """
    rows, columns = height / unit, width / unit
    ratio = columns / rows
    if rows * columns > most:
        rows = (most / ratio) ** 0.5
        columns = rows * ratio
    around = set(product((floor(rows), ceil(rows)), (floor(columns), ceil(columns))))
    fitting = [pair for pair in list(around) if min(pair) >= 1 and pair[0] * pair[1] <= most]
    fitting = fitting or [(max(1, round(rows)), max(1, round(columns)))]
    return TileGrid(*min(fitting, key=lambda pair: abs(pair[0] / pair[1] - height / width)))


def _scales(grids: list[TileGrid], tile: int, size: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return how much an image of `size` [2] grows in each grid; in the type of `size`."""
    scales: NDArray[np.floating] = (np.array(grids, size.dtype) * tile / size).min(axis=1)
    return scales
