"""Phi-4-multimodal: the crops of an image as one picture, row by row, then the whole image."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.errors import ModelLoadError, ValidationError
from tgi_trio.media.phi4 import PATCH, SIDE, WHOLE, Phi4Canvas
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    ImageSize,
    PlainFinish,
    find_token,
    read_int,
)


@dataclass(frozen=True)
class Phi4Layout(PlainFinish):
    """A feature for each two by two patches, one behind each row, and one between both views."""

    canvas: Phi4Canvas
    placeholder: str
    line_end = ""

    @property
    def feature_token(self) -> str:
        return self.placeholder

    def expand(self, size: ImageSize) -> str:
        return self.feature_token * self.count_features(size)

    def count_features(self, size: ImageSize) -> int:
        try:
            rows, columns = self.canvas.cut(*size).features
        except ValueError as error:
            raise ValidationError(f"invalid image: {error}") from error
        return rows * (columns + 1) + 1 + WHOLE


def lay_out_phi4(settings: ImageSettings) -> Phi4Layout:
    """Return the layout of a `phi4_multimodal` model. Raises ModelLoadError."""
    tokenizer_config = {"crop_size": SIDE, "image_size": SIDE, "patch_size": PATCH}
    for name, wanted in tokenizer_config.items():
        if (found := settings.vision.get(name, wanted)) != wanted:
            raise ModelLoadError(
                f"vision_config says {name} {found}; served is {wanted}, of all such models"
            )
    number = read_int(settings.vision, "image_token_id", 200_010)
    token = find_token(settings.tokenizer_config, "image_token", number) or "<|image|>"
    return Phi4Layout(Phi4Canvas.read(settings.image_processor), token)
