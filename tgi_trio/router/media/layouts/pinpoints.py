"""LLaVA-NeXT, OneVision, Granite 4 Vision: the whole image, then the grid of crops that fits it
best, without padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import sqrt
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.router.media.layouts.fixed import FixedLayout, extra_features, patch_size
from tgi_trio.router.media.layouts.layout import (
    ImageLayout,
    ImageSettings,
    ImageSize,
    PlainFinish,
    Settings,
    read_int,
)

_PINPOINTS: Final = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_ONEVISION: Final = 384  # pixels, the side of a crop of LLaVA-OneVision
_ASPECT: Final = "anyres_max_"  # and how many crops are not shrunk
_SHRUNK: Final = 1.1  # a side over one of so many crops, from which on they are


@dataclass(frozen=True)
class PinpointLayout(PlainFinish):
    """Features of one crop, of the image's part of the grid, and one for each row of that."""

    pinpoints: tuple[ImageSize, ...]  # sizes of grids of crops, in pixels
    crop: int  # pixels, the side of a crop
    patch: int  # pixels
    extra: int  # features of the whole image besides its patches
    rate: Fraction = Fraction(1)  # features over patches, of a side
    placeholder: str = "<image>"
    feature_token: str = "<image>"

    def expand(self, size: ImageSize) -> str:
        return self.feature_token * self.count_features(size)

    def count_features(self, size: ImageSize) -> int:
        best = find_pinpoint(size, self.pinpoints)
        side = int(self.crop // self.patch * self.rate)
        shown = unpad(size, side * (best.height // self.crop), side * (best.width // self.crop))
        return side * side + shown.pixels + shown.height + self.extra


@dataclass(frozen=True)
class OnevisionLayout(PinpointLayout):
    """Likewise, and a large grid is shrunk; of several images of a prompt each is seen whole."""

    most: int = 9  # crops; larger grids are shrunk to as many features

    def count_features(self, size: ImageSize) -> int:
        best = find_pinpoint(size, self.pinpoints)
        side = self.crop // self.patch
        shown = unpad(size, side * (best.height // self.crop), side * (best.width // self.crop))
        ratio = sqrt(shown.pixels / (self.most * side**2))
        if ratio > _SHRUNK:
            shown = ImageSize(int(shown.height // ratio), int(shown.width // ratio))
        return side * side + shown.pixels + shown.height + self.extra

    def among(self, count: int) -> ImageLayout:
        if count == 1:
            return self
        features = (self.crop // self.patch) ** 2 + 1 + self.extra  # and the end of a row
        return FixedLayout(self.placeholder, self.feature_token, features)


def find_pinpoint(size: ImageSize, pinpoints: Iterable[ImageSize]) -> ImageSize:
    """Return the size that keeps most of an image's pixels, and among equals wastes least.

    Ties go to the first in the configuration: transformers' `select_best_resolution`.
    """

    def worth(each: ImageSize) -> tuple[int, int]:
        scale = min(each.width / size.width, each.height / size.height)
        kept = min(int(size.width * scale) * int(size.height * scale), size.pixels)
        return kept, -(each.pixels - kept)

    return max(pinpoints, key=worth)


def unpad(size: ImageSize, rows: int, columns: int) -> ImageSize:
    """Return how many rows and columns of a grid of features show the image, not padding."""
    if size.width / size.height > columns / rows:
        shown = int(round(size.height * (columns / size.width), 7))
        return ImageSize(rows - (rows - shown) // 2 * 2, columns)
    shown = int(round(size.width * (rows / size.height), 7))
    return ImageSize(rows, columns - (columns - shown) // 2 * 2)


def lay_out_llava_next(settings: ImageSettings) -> PinpointLayout:
    """Return the layout of a `llava_next` model. Raises ModelLoadError."""
    pinpoints = _read_pinpoints(settings, _PINPOINTS)
    crop = _read_crop(settings, {"shortest_edge": 224})
    return PinpointLayout(pinpoints, crop, patch_size(settings), extra_features(settings))


def lay_out_granite4(settings: ImageSettings) -> PinpointLayout:
    """Return the layout of a `granite4_vision` model. Raises ModelLoadError."""
    found, rate = settings.processor, settings.processor.get("downsample_rate")
    dropped = 1 if found.get("vision_feature_select_strategy") == "default" else 0
    try:
        shrunk = Fraction(1 if rate is None else rate)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelLoadError(f"downsample_rate must be a fraction, not {rate!r}") from error
    return PinpointLayout(
        _read_pinpoints(settings, _PINPOINTS),
        _read_crop(settings, {"shortest_edge": 224}),
        patch_size(settings),
        int(found.get("num_additional_image_tokens", 0)) - dropped,
        shrunk,
    )


def lay_out_llava_onevision(settings: ImageSettings) -> OnevisionLayout:
    """Return the layout of a `llava_onevision` model. Raises ModelLoadError."""
    sides = range(_ONEVISION, 7 * _ONEVISION, _ONEVISION)
    default = _vision_aspect(settings.config, "anyres_max_9")
    aspect = _vision_aspect(settings.processor, default)
    if not aspect.removeprefix(_ASPECT).isdecimal() or aspect != default:
        raise ModelLoadError(
            f"vision_aspect_ratio must be {_ASPECT} and a number, in config.json as in that of its "
            f"processor, not {default!r} and {aspect!r}"
        )
    strategy = settings.processor.get("vision_feature_select_strategy", "full")
    return OnevisionLayout(
        _read_pinpoints(settings, [(high, wide) for high in sides for wide in sides]),
        _read_crop(settings, {"height": _ONEVISION, "width": _ONEVISION}),
        read_int(settings.vision, "patch_size", 14),
        -1 if strategy == "default" else 0,
        most=int(aspect.removeprefix(_ASPECT)),
    )


def _vision_aspect(settings: Settings, default: str) -> str:
    return str(settings.get("vision_aspect_ratio", default))


def _read_pinpoints(
    settings: ImageSettings, default: Iterable[tuple[int, int]]
) -> tuple[ImageSize, ...]:
    listed = settings.image_processor.get("image_grid_pinpoints") or default
    try:
        return tuple(ImageSize(int(height), int(width)) for height, width in listed)
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"image_grid_pinpoints must be pairs of numbers: {error}") from error


def _read_crop(settings: ImageSettings, default: Settings) -> int:
    size = settings.size("size", default)
    edge = size.get("shortest_edge")
    return read_int({"size": edge or min(size.get("height", 0), size.get("width", 0))}, "size")
