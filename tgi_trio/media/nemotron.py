"""Nemotron 3 Nano Omni: what an image is resized to.

For who counts its tokens, and for who makes its pixels. Source: `get_patch_grid_size` and the image
processor of `transformers`' `nemotron_h_omni`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Any, Final, Self

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.canvases import TileGrid, check_counts

_AROUND: Final = 4  # tokens of a context that it leaves for what is not an image


@dataclass(frozen=True, slots=True)
class NemotronCanvas:
    """What a model's files say of it."""

    patch: int  # pixels, a side
    merge: int  # patches of a side of what becomes one feature
    least: int  # patches of an image
    most: int

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Return what the settings of an image processor say.

        Raises ModelLoadError, also where an image's size would follow from how many there are.
        """
        found = {
            "patch_size": settings.get("patch_size", 16),
            "min_num_patches": settings.get("min_num_patches", 1024),
            "max_num_patches": settings.get("max_num_patches", 13312),
            "max_model_len": settings.get("max_model_len", 16384),
        }
        check_counts(found)
        patch, least, most, context = found.values()
        ratio = settings.get("downsample_ratio", 0.5)
        if not isinstance(ratio, float | int) or not 0 < ratio <= 1:
            raise ModelLoadError(f"downsample_ratio must be more than 0 and at most 1, not {ratio}")
        merge = round(1 / ratio)
        if (context - _AROUND) * merge**2 < max(least, most):
            raise ModelLoadError(
                f"max_model_len {context} has less room than max_num_patches {most}, and images of "
                "a size that depends on how many there are are not served"
            )
        return cls(patch, merge, least, max(least, most))

    def fit(self, height: int, width: int) -> TileGrid:
        """Return rows and columns of patches of an image, which fills them all."""
        # Halves are rounded to even numbers, as there.
        rows, columns = (round(side / self.patch + 0.5) for side in (height, width))
        shrink = min(sqrt(self.most / (rows * columns)), 1.0)
        rows, columns = floor(shrink * rows), floor(shrink * columns)
        if self.most > self.least and rows * columns < self.least:
            grow = sqrt(self.least / (rows * columns))
            rows, columns = ceil(grow * rows), ceil(grow * columns)
        rows = self._round(rows, columns)
        return TileGrid(rows, self._round(columns, rows))

    def _round(self, count: int, other: int) -> int:
        """Return a side's patches as a multiple of what is merged: more where there is room."""
        if not (over := count % self.merge):
            return count
        more = count + self.merge - over
        return more if more * other <= self.most else max(self.merge, count - over)
