"""Step 3.7: the windows that an image is cut into, and the sizes that it is resized to before.

For who counts its tokens, and for who makes its pixels. Source: `transformers`' image processor of
this family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from tgi_trio.media.canvases import TileGrid, check_counts

_NARROW: Final = 32  # pixels of the shorter side below which a long image is made a square
_STEEP: Final = 4  # longer side over shorter, from which an image is long
_SLIGHT: Final = 1.5  # likewise, of a small image that is cut nevertheless
_REST: Final = 0.2  # part of a window from which on another window is begun for it


@dataclass(frozen=True, slots=True)
class Step3p7Cut:
    """How one image is cut; sizes are [height, width] in pixels."""

    square: int  # side to which it is filled up with black; 0: it stays as it is
    whole: tuple[int, int]  # to which it is resized before the view of the whole
    cropped: tuple[int, int]  # to which it is resized before it is cut
    window: int  # side of the windows; 0: there are none
    grid: TileGrid  # of windows


@dataclass(frozen=True, slots=True)
class Step3p7Canvas:
    """What a model's files say of it; all in pixels."""

    side: int  # of the view of the whole image
    window: int  # side of a window, as the tower sees it
    longest: int  # longer side of an image beyond which it is shrunk first
    stride: int  # side of what one feature sees

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Return what the settings of an image processor say; raises ModelLoadError."""
        size = settings.get("size") or {"height": 728, "width": 728}
        shape = size if isinstance(size, Mapping) else {}
        found = {
            "size": shape.get("height"),
            "patch_size": settings.get("patch_size", 504),
            "max_image_size": settings.get("max_image_size", 3024),
            "vision_patch_size": settings.get("vision_patch_size", 14),
            "downsampler_stride": settings.get("downsampler_stride", 4),
        }
        check_counts(found)
        side, window, longest, patch, steps = found.values()
        return cls(side, window, longest, patch * steps)

    @property
    def whole_features(self) -> int:
        """How many features the view of the whole image has."""
        return int((self.side // self.stride) ** 2)

    @property
    def window_features(self) -> int:
        """How many features a window has."""
        return int((self.window // self.stride) ** 2)

    def cut(self, height: int, width: int) -> Step3p7Cut:
        """Return how an image of this size is cut; raises ValueError if nothing is left of it."""
        square = 0
        if min(height, width) < _NARROW and max(width / height, height / width) > _STEEP:
            square = height = width = max(height, width)
        if max(height, width) > self.longest:
            scale = self.longest / max(height, width)
            height, width = int(height * scale), int(width * scale)
        if not height * width:
            raise ValueError("nothing is left of the image at this model's size")
        window = self._choose_window(min(height, width), max(height, width))
        if not window:
            return Step3p7Cut(square, (height, width), (height, width), 0, TileGrid(0, 0))
        high, wide = (_snap(side, window) for side in (height, width))
        grid = TileGrid(max(1, high // window), max(1, wide // window))
        return Step3p7Cut(square, (height, width), (high, wide), window, grid)

    def _choose_window(self, short: int, long: int) -> int:
        if long <= self.side:
            return short if long / short > _SLIGHT else 0
        return min(short, self.window) if long / short > _STEEP else self.window


def _snap(side: int, window: int) -> int:
    """Return a side as a multiple of a window's, unless it is shorter than one."""
    if side < window:
        return side
    return window * (side // window + (side % window > _REST * window))
