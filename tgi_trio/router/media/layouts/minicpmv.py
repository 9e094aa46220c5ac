"""MiniCPM-V 4.6 and MiniCPM-OCR: the whole image, then slices of a large one, behind its number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log, sqrt
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    ImageSize,
    PlainFinish,
    read_int,
)

_MERGES: Final = {"16x": 4, "4x": 2}  # patches of a side of what becomes one feature


@dataclass(frozen=True)
class MiniCpmLayout(PlainFinish):
    """The image at about one size, and where it is larger a grid of slices of about that size."""

    side: int  # pixels, of a square of as many pixels as a slice has
    unit: int  # pixels, the side of what becomes one feature
    most: int  # slices
    numbers: bool  # images of a prompt are counted
    placeholder: str = "<|image_pad|>"
    feature_token: str = "<|image_pad|>"

    def number(self, index: int) -> str:
        return f"<image_id>{index}</image_id>" if self.numbers else ""

    def expand(self, size: ImageSize) -> str:
        rows, columns = self.count_slices(size)
        whole = f"<image>{self.feature_token * self._count_whole(size)}</image>"
        one = f"<slice>{self.feature_token * self._count_slice(size)}</slice>"
        return whole + "\n".join([one * columns] * rows)

    def count_features(self, size: ImageSize) -> int:
        return self._count_whole(size) + self.count_slices(size).pixels * self._count_slice(size)

    def count_slices(self, size: ImageSize) -> ImageSize:
        """Return rows and columns of slices, (0, 0) for an image that is not cut.

        The grid nearest to the image's proportions; of equals the first, or the one of more rows.
        """
        wanted = min(ceil(size.pixels / self.side**2), self.most)
        if wanted <= 1:
            return ImageSize(0, 0)
        ratio = log(size.width / size.height)
        return min(
            self._list_grids(wanted),
            key=lambda grid: (abs(ratio - log(grid.width / grid.height)), -grid.height),
        )

    def _list_grids(self, wanted: int) -> Iterator[ImageSize]:
        for count in range(max(2, wanted - 1), min(wanted + 1, self.most) + 1):
            for rows in range(1, count + 1):
                if count % rows == 0:
                    yield ImageSize(rows, count // rows)

    def _count_whole(self, size: ImageSize) -> int:
        grows = not self.count_slices(size).pixels
        return self._count_units(size.height, size.width, grows)

    def _count_slice(self, size: ImageSize) -> int:
        rows, columns = self.count_slices(size)
        if not rows:
            return 0
        height, width = _round(size.height, rows) / rows, _round(size.width, columns) / columns
        return self._count_units(height, width, grows=True)

    def _count_units(self, height: float, width: float, grows: bool) -> int:
        """Return the features of a part of so many pixels, `grows`: if it is enlarged as well."""
        if grows or height * width > self.side**2:
            ratio = width / height
            height = int(self.side / sqrt(ratio))
            width = int(height * ratio)
        return (_round(height, self.unit) // self.unit) * (_round(width, self.unit) // self.unit)


def _round(length: float, unit: int) -> int:
    """Return the multiple of a unit that is nearest to a length, at least one."""
    return max(round(length / unit) * unit, unit)


def lay_out_minicpmv(settings: ImageSettings) -> MiniCpmLayout:
    """Return the layout of a `minicpmv4_6` model. Raises ModelLoadError."""
    return _lay_out(settings, "16x")


def lay_out_minicpm_ocr(settings: ImageSettings) -> MiniCpmLayout:
    """Return the layout of a `minicpm_ocr` model.

    Raises ModelLoadError, also where sizes of images depend on what they show.
    """
    found = settings.image_processor.get("small_image_upsize", "always")
    if found != "always":
        raise ModelLoadError(
            f"small_image_upsize is {found!r} in the settings of its image processor, and small "
            "images are always enlarged here"
        )
    return _lay_out(settings, "4x")


def _lay_out(settings: ImageSettings, mode: str) -> MiniCpmLayout:
    found, owned = settings.image_processor, settings.config.get("downsample_mode", mode)
    mode = found.get("downsample_mode", mode)
    if mode not in _MERGES or owned != mode:
        raise ModelLoadError(
            f"downsample_mode must be one of {', '.join(_MERGES)}, in config.json as in the "
            f"settings of its image processor, not {owned!r} and {mode!r}"
        )
    return MiniCpmLayout(
        side=read_int(found, "scale_resolution", 448),
        unit=read_int(found, "patch_size", 14) * _MERGES[mode],
        most=read_int(found, "max_slice_nums", 9) if found.get("slice_mode", True) else 1,
        numbers=bool(found.get("use_image_id", True)),
    )
