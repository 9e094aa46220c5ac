"""Gemma 3, 3n and 4: soft tokens between an image's marks."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.errors import ModelLoadError, ValidationError
from tgi_trio.media.canvases import fit_gemma4
from tgi_trio.router.media.layouts.fixed import FixedLayout
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    ImageSize,
    PlainFinish,
    read_int,
)


@dataclass(frozen=True)
class Gemma4Layout(PlainFinish):
    """As many soft tokens as a limit allows, in the image's own proportions."""

    unit: int  # pixels, the side of a soft token's square
    most: int  # most soft tokens
    placeholder: str = "<|image|>"
    feature_token: str = "<|image|>"

    def expand(self, size: ImageSize) -> str:
        return f"<|image>{self.feature_token * self.count_features(size)}<image|>"

    def count_features(self, size: ImageSize) -> int:
        try:
            return fit_gemma4(*size, self.unit, self.most).tiles
        except ValueError as error:
            raise ValidationError(
                "invalid image: nothing is left of it at this model's size"
            ) from error


def lay_out_gemma3(settings: ImageSettings) -> FixedLayout:
    """Return the layout of a `gemma3` model. Raises ModelLoadError.

    Crops of long images (`do_pan_and_scan`) are not made: transformers' processor makes them only
    if its caller asks, whatever the model's files say.
    """
    features = read_int(settings.config, "mm_tokens_per_image", 256)
    return FixedLayout(
        placeholder="<start_of_image>",
        feature_token="<image_soft_token>",
        features=read_int(settings.processor, "image_seq_length", features),
        before="\n\n<start_of_image>",
        after="<end_of_image>\n\n",
    )


def lay_out_gemma3n(settings: ImageSettings) -> FixedLayout:
    """Return the layout of a `gemma3n` model. Raises ModelLoadError."""
    soft = "<image_soft_token>"
    return FixedLayout(
        placeholder=soft,
        feature_token=soft,
        features=read_int(settings.processor, "image_seq_length", 256),
        before="\n\n<start_of_image>",
        after="<end_of_image>\n\n",
        mark_tokens=("<end_of_image>",),
    )


def lay_out_gemma4(settings: ImageSettings) -> Gemma4Layout:
    """Return the layout of a `gemma4` model. Raises ModelLoadError."""
    found = settings.image_processor
    patch = read_int(found, "patch_size", 16)
    pooling = read_int(found, "pooling_kernel_size", 3)
    return Gemma4Layout(patch * pooling, read_int(found, "max_soft_tokens", 280))


def lay_out_gemma4_unified(settings: ImageSettings) -> Gemma4Layout:
    """Return the layout of a `gemma4_unified` model.

    Raises ModelLoadError, also where an image may have more tokens than a layer's window: in
    `transformers` its tokens see each other nevertheless.
    """
    layout, window = lay_out_gemma4(settings), read_int(settings.config, "sliding_window", 1024)
    if layout.most > window:
        raise ModelLoadError(
            f"max_soft_tokens is {layout.most} in the settings of its image processor, and "
            f"sliding_window is {window}: images are not larger than a window here"
        )
    return layout
