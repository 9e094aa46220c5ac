"""Step 3.7: the windows of an image row by row, then the whole image."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.errors import ValidationError
from tgi_trio.media.canvases import TileGrid
from tgi_trio.media.step3p7 import Step3p7Canvas
from tgi_trio.router.media.layouts.layout import ImageSettings, ImageSize, PlainFinish


@dataclass(frozen=True)
class Step3p7Layout(PlainFinish):
    """The features of each view between its marks; a newline's mark after each row but the last."""

    canvas: Step3p7Canvas
    placeholder: str = "<im_patch>"
    feature_token: str = "<im_patch>"

    def expand(self, size: ImageSize) -> str:
        rows, columns = self._cut(size)
        window = self.feature_token * self.canvas.window_features
        row = f"<patch_start>{window}<patch_end>" * columns
        whole = self.feature_token * self.canvas.whole_features
        return "<patch_newline>".join([row] * rows) + f"<im_start>{whole}<im_end>"

    def count_features(self, size: ImageSize) -> int:
        windows = self._cut(size).tiles
        return windows * self.canvas.window_features + self.canvas.whole_features

    def _cut(self, size: ImageSize) -> TileGrid:
        try:
            return self.canvas.cut(*size).grid
        except ValueError as error:
            raise ValidationError(f"invalid image: {error}") from error


def lay_out_step3p7(settings: ImageSettings) -> Step3p7Layout:
    """Return the layout of a `step3p7` model. Raises ModelLoadError."""
    return Step3p7Layout(Step3p7Canvas.read(settings.image_processor))
