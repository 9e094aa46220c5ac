"""Idefics 1 to 3 and SmolVLM: an image's tiles between marks, then the whole image."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil
from typing import Final

from tgi_trio.router.media.layouts.fixed import FixedLayout
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    ImageSize,
    PlainFinish,
    read_int,
)

_FAKE: Final = "<fake_token_around_image>"
_GLOBAL: Final = "<global-img>"
_WORD_BEHIND: Final = re.compile(rf"{_FAKE}(?=[^\s<])")
_LARGEST: Final = 4096  # most pixels of a side, whatever the settings say


@dataclass(frozen=True)
class TileLayout(PlainFinish):
    """A line of text for every row of tiles, then the whole image."""

    longest: int  # pixels, the longer side before the image is cut into tiles
    tile: int  # pixels, a tile's side
    features: int  # of one tile, and of the whole image
    splits: bool = True
    placeholder: str = "<image>"
    feature_token: str = "<image>"

    def expand(self, size: ImageSize) -> str:
        one = self.feature_token * self.features
        rows, columns = self.count_tiles(size)
        tiles = "".join(
            "".join(f"{_FAKE}<row_{row + 1}_col_{column + 1}>{one}" for column in range(columns))
            + "\n"
            for row in range(rows)
        )
        between = "\n" if rows else ""
        return f"{tiles}{between}{self.write_whole()}"

    def write_whole(self) -> str:
        """Return the text of the whole image."""
        return f"{_FAKE}{_GLOBAL}{self.feature_token * self.features}{_FAKE}"

    def count_features(self, size: ImageSize) -> int:
        rows, columns = self.count_tiles(size)
        return self.features * (rows * columns + 1)

    def count_tiles(self, size: ImageSize) -> tuple[int, int]:
        """Return rows and columns; (0, 0) for an image that is one tile or must not be cut."""
        if not self.splits:
            return 0, 0
        height, width = _limit(_stretch(size, self.longest), _LARGEST)
        rows, columns = ceil(height / self.tile), ceil(width / self.tile)
        return (rows, columns) if rows > 1 or columns > 1 else (0, 0)


def _stretch(size: ImageSize, longest: int) -> ImageSize:
    """Scale the longer side to `longest`, the other to an even number nearby."""
    ratio = size.width / size.height
    if size.width >= size.height:
        height = int(longest / ratio)
        return ImageSize(max(height + height % 2, 1), longest)
    width = int(longest * ratio)
    return ImageSize(longest, max(width + width % 2, 1))


def _limit(size: ImageSize, longest: int) -> ImageSize:
    """Scale down so that no side is longer than `longest`."""
    if max(size) <= longest:
        return size
    ratio = size.width / size.height
    if size.width >= size.height:
        return ImageSize(max(int(longest / ratio), 1), longest)
    return ImageSize(longest, max(int(longest * ratio), 1))


@dataclass(frozen=True)
class IdeficsLayout(FixedLayout):
    """Marks around images, shared by neighbours; texts around images lose their spaces."""

    writes_bos = True

    def finish(self, text: str, bos: str) -> str:
        mark = re.escape(_FAKE)
        marked = re.sub(rf" *((?:{mark})+(?:<image>(?:{mark})+)+) *", r"\1", text)
        return bos + re.sub(rf"(?:{mark}){{2}}", _FAKE, marked).strip(" ")


def lay_out_idefics(settings: ImageSettings) -> IdeficsLayout:
    """Return the layout of Idefics 1, whose layers attend to images at one token each."""
    return IdeficsLayout("<image>", "<image>", 1, before=_FAKE, after=_FAKE)


def lay_out_idefics3(settings: ImageSettings) -> TileLayout:
    """Return the layout of an `idefics3` or `smolvlm` model. Raises ModelLoadError."""
    side = read_int(settings.vision, "image_size", 364)
    patches = side // read_int(settings.vision, "patch_size", 14)
    scale = read_int(settings.config, "scale_factor", 2)
    return TileLayout(
        longest=read_int(settings.size("size", {}), "longest_edge", 4 * 364),
        tile=read_int(settings.size("max_image_size", {}), "longest_edge", 364),
        features=read_int(settings.processor, "image_seq_len", patches**2 // scale**2),
        splits=bool(settings.image_processor.get("do_image_splitting", True)),
    )


def lay_out_idefics2(settings: ImageSettings) -> Idefics2Layout:
    """Return the layout of an `idefics2` model: its latents, five times if images are cut."""
    perceiver = settings.config.get("perceiver_config") or {}
    latents = read_int(
        settings.processor, "image_seq_len", perceiver.get("resampler_n_latents", 64)
    )
    parts = 5 if settings.image_processor.get("do_image_splitting") else 1
    return Idefics2Layout("<image>", "<image>", latents * parts, _FAKE, _FAKE, parts=parts)


@dataclass(frozen=True)
class Idefics2Layout(FixedLayout):
    """Equal parts of latents, each between marks."""

    parts: int = 1

    def expand(self, size: ImageSize) -> str:
        one = self.feature_token * (self.features // self.parts)
        return _FAKE + (one + _FAKE) * self.parts

    def finish(self, text: str, bos: str) -> str:
        """Merge marks of adjacent images; add a space between a mark and a word."""
        return _WORD_BEHIND.sub(f"{_FAKE} ", text.replace(_FAKE * 2, _FAKE))
