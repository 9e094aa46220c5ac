"""Ovis 2: the whole image, then its tiles, between marks that have features as well."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.media.canvases import ONE_TILE, TileGrid, fit_internvl, fit_ovis2
from tgi_trio.router.media.layouts.canvas import CanvasLayout
from tgi_trio.router.media.layouts.layout import ImageSettings, ImageSize, read_int


@dataclass(frozen=True)
class Ovis2Layout(CanvasLayout):
    """Marks before and behind the whole image, between tiles of a row, between rows, at the end."""

    mark_tokens: tuple[str, ...] = (
        *("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
    )

    def expand(self, size: ImageSize) -> str:
        tile = self.feature_token * self.features
        rows, columns = self.count_grid(size)
        row = "<IMG_COL>".join([tile] * columns)
        tiles = "<IMG_ROW>".join([row] * rows) if rows * columns > 1 else ""
        return f"<IMG_START>{tile}<IMG_GRID>{tiles}<IMG_END>"

    def count_features(self, size: ImageSize) -> int:
        between = self.count_grid(size).tiles - 1
        return super().count_features(size) + 3 + between


def lay_out_ovis2(settings: ImageSettings) -> Ovis2Layout:
    """Return the layout of an `ovis2` model. Raises ModelLoadError."""
    found = settings.image_processor
    side = read_int(settings.size("size", {}), "height", 384)
    least, most = read_int(found, "min_patches", 1), read_int(found, "max_patches", 12)
    cuts = bool(found.get("crop_to_patches", False)) and most > 1
    covers = bool(found.get("use_covering_area_grid", True))

    def fit(size: ImageSize) -> TileGrid:
        if not cuts:
            return ONE_TILE
        if covers:
            return fit_ovis2(*size, side, most)
        return fit_internvl(*size, side, least, most)

    return Ovis2Layout(
        fit,
        features=read_int(settings.processor, "image_seq_length", 256),
        placeholder="<image>",
        feature_token="<IMG_ATOM>",
    )
