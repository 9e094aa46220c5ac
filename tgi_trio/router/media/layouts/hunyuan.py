"""Hunyuan VL: merged patches with a mark behind each row, between two more, all as features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.router.media.layouts.grid import GridLayout
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    ImageSize,
    find_token,
    read_int,
)

_SIZE: Final = {"shortest_edge": 512 * 512, "longest_edge": 2048 * 2048}  # pixels
# What stands for the tokens of HunyuanOCR, and by which key of config.json their ids are found.
_TOKENS: Final = {
    "image_token": ("<\uff5chy_place▁holder▁no▁102\uff5c>", "image_token_id"),
    "image_start_token": ("<\uff5chy_place▁holder▁no▁100\uff5c>", "im_start_id"),
    "image_end_token": ("<\uff5chy_place▁holder▁no▁101\uff5c>", "im_end_id"),
}


@dataclass(frozen=True)
class HunyuanLayout(GridLayout):
    """The image at its own size, within limits, in units of merged patches."""

    def count_features(self, size: ImageSize) -> int:
        rows, columns = self.count_units(size)
        return rows * (columns + 1) + 2


def lay_out_hunyuan(settings: ImageSettings) -> HunyuanLayout:
    """Return the layout of a `hunyuan_vl` model.

    Raises ModelLoadError, also for settings by which an image has other tokens than its tower has
    features: patches of several frames or pixels, or no marks around the rows.
    """
    found, size = settings.image_processor, settings.size("size", _SIZE)
    for name in ("temporal_patch_size", "spatial_patch_size"):
        if (said := read_int(found, name, 1)) != 1:
            raise ModelLoadError(f"{name} is {said} in the image settings, and has to be 1")
    if not settings.processor.get("cat_extra_token", True):
        raise ModelLoadError(
            "cat_extra_token is false in processor_config.json, and the tower of this model has "
            "features for the tokens that would be left out"
        )
    token, start, end = (_find(settings, name) for name in _TOKENS)
    return HunyuanLayout(
        unit=read_int(found, "patch_size", 16) * read_int(found, "merge_size", 2),
        least=read_int(found, "min_pixels", size.get("shortest_edge")),
        most=read_int(found, "max_pixels", size.get("longest_edge")),
        placeholder=token,
        feature_token=token,
        around=(start, end),
    )


def _find(settings: ImageSettings, name: str) -> str:
    default, key = _TOKENS[name]
    number = settings.config.get(key)
    told = find_token(settings.tokenizer_config, name, number if isinstance(number, int) else None)
    return told or default
