"""Qwen-VL and its kin, GLM-V, Kimi, MiniMax-M3, Muse Glimmer: a feature for each merged patch."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Final

from tgi_trio.errors import ModelLoadError, ValidationError
from tgi_trio.media.canvases import fit_muse
from tgi_trio.media.kimi_k25 import KimiCanvas
from tgi_trio.media.minimax_m3 import limit_size
from tgi_trio.media.nemotron import NemotronCanvas
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    ImageSize,
    PlainFinish,
    Settings,
    read_int,
)

_CAPITALS: Final = "<|IMAGE_PAD|>"
OMNI_MARKS: Final = "<|vision_bos|>", "<|vision_eos|>"
_FACTOR: Final = 1  # merged patches of a step in which images are resized
_QWEN_SIZE: Final = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # pixels
_PADDLE_SIZE: Final = {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536}
_STEEPEST: Final = 200  # most of the longer side over the shorter one


@dataclass(frozen=True)
class GridLayout(PlainFinish):
    """The image at its own size, within limits, in units of merged patches."""

    unit: int  # pixels, the side of a merged patch
    least: int  # least pixels of the whole image
    most: int
    placeholder: str = "<|image_pad|>"
    feature_token: str = "<|image_pad|>"
    around: tuple[str, str] = ("<|vision_start|>", "<|vision_end|>")
    before: str = ""  # what `expand` writes beside features
    after: str = ""

    def expand(self, size: ImageSize) -> str:
        return f"{self.before}{self.feature_token * self.count_features(size)}{self.after}"

    def count_features(self, size: ImageSize) -> int:
        return self.count_units(size).pixels

    def count_units(self, size: ImageSize) -> ImageSize:
        """Return rows and columns of merged patches: transformers' `smart_resize`.

        Raises ValidationError for an image that is too long and narrow.
        """
        return _fit(size, self.unit, self.least, self.most)


@dataclass(frozen=True)
class PaddleLayout(GridLayout):
    """Short sides are enlarged first, each to a merged patch."""

    placeholder: str = "<|IMAGE_PLACEHOLDER|>"
    feature_token: str = "<|IMAGE_PLACEHOLDER|>"
    around: tuple[str, str] = ("<|IMAGE_START|>", "<|IMAGE_END|>")

    def count_units(self, size: ImageSize) -> ImageSize:
        """Return rows and columns of merged patches: transformers' `smart_resize` of PaddleOCR-VL.

        Raises ValidationError for an image that is too long and narrow.
        """
        height, width = size
        if height < self.unit:
            height, width = self.unit, round(width * self.unit / height)
        if width < self.unit:
            height, width = round(height * self.unit / width), self.unit
        return _fit(ImageSize(height, width), self.unit, self.least, self.most)


@dataclass(frozen=True)
class GlmLayout(GridLayout):
    """Limits hold for all frames of a repeated picture together; short sides are enlarged."""

    frames: int = 2
    placeholder: str = "<|image|>"
    feature_token: str = "<|image|>"
    around: tuple[str, str] = ("<|begin_of_image|>", "<|end_of_image|>")

    def count_units(self, size: ImageSize) -> ImageSize:
        """Return rows and columns of merged patches: transformers' `smart_resize` of GLM-4.1V.

        Raises ValidationError for an image that is too long and narrow.
        """
        grow = max(self.unit / size.height, self.unit / size.width)
        if grow > 1:
            size = ImageSize(int(size.height * grow), int(size.width * grow))
        return _fit(size, self.unit, self.least, self.most, self.frames)


@dataclass(frozen=True)
class Glm5Layout(GridLayout):
    """The image at its own size, its last patches filled up; limits are in merged patches."""

    placeholder: str = "<|image|>"
    feature_token: str = "<|image|>"
    around: tuple[str, str] = ("<|begin_of_image|>", "<|end_of_image|>")

    def count_units(self, size: ImageSize) -> ImageSize:
        """Return rows and columns of merged patches: transformers' `smart_resize` of GLM 5.3."""
        found = self._cover(size)
        if found.pixels < self.least:
            grow = sqrt(self.least * self.unit**2 / size.pixels)
            found = self._cover(ImageSize(ceil(size.height * grow), ceil(size.width * grow)))
        return self._shrink(size) if found.pixels > self.most else found

    def _cover(self, size: ImageSize) -> ImageSize:
        return ImageSize(ceil(size.height / self.unit), ceil(size.width / self.unit))

    def _shrink(self, size: ImageSize) -> ImageSize:
        """Return the rows and columns of the highest image of these proportions within limits."""
        best, low, high = ImageSize(1, 1), 1, size.height
        while low <= high:
            height = (low + high) // 2
            width = max(1, floor(size.width * height / size.height))
            found = self._cover(ImageSize(height, width))
            if found.pixels <= self.most:
                best, low = found, height + 1
            else:
                high = height - 1
        return best


@dataclass(frozen=True)
class KimiLayout(PlainFinish):
    """The image at its own size or shrunk, its last patches filled up."""

    canvas: KimiCanvas
    placeholder: str = "<|media_pad|>"
    feature_token: str = "<|media_pad|>"
    around: tuple[str, str] = ("<|media_begin|>image<|media_content|>", "<|media_end|>")

    def expand(self, size: ImageSize) -> str:
        return self.feature_token * self.count_features(size)

    def count_features(self, size: ImageSize) -> int:
        return self.canvas.count_units(*size).tiles


@dataclass(frozen=True)
class NemotronLayout(PlainFinish):
    """The image near its own size, resized to merged patches."""

    canvas: NemotronCanvas
    placeholder: str = "<image>"
    feature_token: str = "<image>"
    around: tuple[str, str] = ("", "")

    def expand(self, size: ImageSize) -> str:
        return f"<img>{self.feature_token * self.count_features(size)}</img>"

    def count_features(self, size: ImageSize) -> int:
        return self.canvas.fit(*size).tiles // self.canvas.merge**2


@dataclass(frozen=True)
class MuseLayout(GridLayout):
    """The grid nearest to the image's proportions; limits are in merged patches."""

    def count_units(self, size: ImageSize) -> ImageSize:
        return ImageSize(*fit_muse(*size, self.unit, self.most))


def _fit(size: ImageSize, unit: int, least: int, most: int, frames: int = 1) -> ImageSize:
    steep = max(size) / min(size)
    if steep > _STEEPEST:
        raise ValidationError(
            f"invalid image: one side is {steep:.0f} times as long as the other, and this "
            f"model takes {_STEEPEST}"
        )
    rows, columns = round(size.height / unit), round(size.width / unit)
    if frames * rows * columns * unit**2 > most:
        shrink = sqrt(frames * size.pixels / most)
        rows = max(1, floor(size.height / shrink / unit))
        columns = max(1, floor(size.width / shrink / unit))
    elif frames * rows * columns * unit**2 < least:
        grow = sqrt(least / (frames * size.pixels))
        rows = ceil(size.height * grow / unit)
        columns = ceil(size.width * grow / unit)
    return ImageSize(rows, columns)


def lay_out_glm(settings: ImageSettings) -> GlmLayout:
    """Return the layout of a GLM vision model. Raises ModelLoadError."""
    found = settings.image_processor
    size = settings.size("size", {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000})
    return GlmLayout(
        unit=_glm_unit(settings),
        least=read_int(size, "shortest_edge"),
        most=read_int(size, "longest_edge"),
        frames=read_int(found, "temporal_patch_size", 2),
    )


def lay_out_glm5(settings: ImageSettings) -> Glm5Layout:
    """Return the layout of a `glm5_next` model. Raises ModelLoadError."""
    found = settings.image_processor
    return Glm5Layout(
        unit=_glm_unit(settings),
        least=read_int(found, "min_image_tokens", 16),
        most=read_int(found, "max_image_tokens", 8000),
    )


def _glm_unit(settings: ImageSettings) -> int:
    """Return the side of a merged patch in pixels.

    Raises ModelLoadError where images are made in steps of several: transformers makes them so by
    torchvision alone.
    """
    found = settings.image_processor
    if (factor := read_int(found, "patch_expand_factor", _FACTOR)) != _FACTOR:
        raise ModelLoadError(
            f"patch_expand_factor is {factor} in the settings of its image processor, and images "
            f"are made for {_FACTOR} here"
        )
    return _read_unit(found)


def _read_unit(settings: Settings) -> int:
    """Return the side of a merged patch in pixels. Raises ModelLoadError."""
    return read_int(settings, "patch_size", 14) * read_int(settings, "merge_size", 2)


def lay_out_kimi(settings: ImageSettings) -> KimiLayout:
    """Return the layout of a `kimi_k25` model. Raises ModelLoadError."""
    return KimiLayout(KimiCanvas.read(settings.image_processor))


def lay_out_minimax_m3(settings: ImageSettings) -> GridLayout:
    """Return the layout of a `minimax_m3_vl` model. Raises ModelLoadError."""
    found = limit_size(settings.image_processor)
    least, most = (read_int(found["size"], f"{which}_edge") for which in ("shortest", "longest"))
    return GridLayout(
        _read_unit(found),
        least,
        most,
        placeholder="]<]image[>[",
        feature_token="]<]image[>[",
        around=("", ""),
        before="]<]start of image[>[",
        after="]<]end of image[>[",
    )


def lay_out_nemotron(settings: ImageSettings) -> NemotronLayout:
    """Return the layout of a `nemotron_h_omni` model. Raises ModelLoadError."""
    return NemotronLayout(NemotronCanvas.read(settings.image_processor))


def lay_out_muse(settings: ImageSettings) -> MuseLayout:
    """Return the layout of a `muse_glimmer` model. Raises ModelLoadError."""
    found = settings.image_processor
    return MuseLayout(
        _read_unit(found),
        1,
        read_int(found, "max_image_tokens", 4096),
        placeholder="<|patch|>",
        feature_token="<|patch|>",
        around=("", ""),
        before="<|image_start|>",
        after="<|image_end|>",
    )


def lay_out_exaone(settings: ImageSettings) -> GridLayout:
    """Return the layout of an `exaone4_5` model. Raises ModelLoadError."""
    return GridLayout(*_read_limits(settings, _QWEN_SIZE), around=("<vision>", "</vision>"))


def lay_out_hyperclovax(settings: ImageSettings) -> GridLayout:
    """Return the layout of a `hyperclovax_vision_v2` model. Raises ModelLoadError."""
    limits = _read_limits(settings, _QWEN_SIZE)
    return GridLayout(*limits, _CAPITALS, _CAPITALS, ("<|image_start|>", "<|image_end|>"))


def lay_out_paddleocr(settings: ImageSettings) -> PaddleLayout:
    """Return the layout of a `paddleocr_vl` model. Raises ModelLoadError."""
    return PaddleLayout(*_read_limits(settings, _PADDLE_SIZE))


def lay_out_compass(settings: ImageSettings) -> GridLayout:
    """Return the layout of a `cohere_compass` model. Raises ModelLoadError."""
    limits = _read_limits(settings, _QWEN_SIZE)
    return GridLayout(*limits, _CAPITALS, _CAPITALS, ("<|VISION_START|>", "<|VISION_END|>"))


def lay_out_qwen(settings: ImageSettings) -> GridLayout:
    """Return the layout of a Qwen-VL model. Raises ModelLoadError."""
    return GridLayout(*_read_limits(settings, _QWEN_SIZE))


def lay_out_qwen2_5_omni(settings: ImageSettings) -> GridLayout:
    """Return the layout of a Qwen2.5-Omni model. Raises ModelLoadError."""
    limits = _read_limits(settings, _QWEN_SIZE)
    return GridLayout(*limits, "<|IMAGE|>", "<|IMAGE|>", OMNI_MARKS)


def _read_limits(settings: ImageSettings, default: Settings) -> tuple[int, int, int]:
    """Return the side of a merged patch, and the least and most pixels of an image."""
    found, size = settings.image_processor, settings.size("size", default)
    least = read_int(found, "min_pixels", size.get("shortest_edge"))
    most = read_int(found, "max_pixels", size.get("longest_edge"))
    return _read_unit(found), least, most
