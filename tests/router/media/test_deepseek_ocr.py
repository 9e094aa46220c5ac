"""Views of DeepSeek-OCR: as transformers' own processors make them, and what is no such."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.router.media.image_files import noise
from tests.router.media.torchvision_processors import inherited_processor
from tgi_trio.errors import ModelLoadError
from tgi_trio.media.processors import PixelProcessor
from tgi_trio.model.deepseek_ocr import find_pictures
from tgi_trio.router.media.layouts.layout import ImageSettings
from tgi_trio.router.media.layouts.table import LAYOUTS

FEW: dict[str, Any] = {"size": {"height": 64, "width": 64}, "tile_size": 40, "max_patches": 5}
SIDES = st.integers(1, 200)


@settings(max_examples=30)
@given(height=SIDES, width=SIDES)
@example(height=40, width=40)
@example(height=41, width=17)
@example(height=200, width=3)
def test_views_are_those_of_the_processor_with_pillow(height: int, width: int) -> None:
    """Of DeepSeek-OCR 2, to the last bit; its own numbers of tiles come first there."""
    from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
        DeepseekOcr2ImageProcessorPil,
    )

    kind: Any = DeepseekOcr2ImageProcessorPil
    own = {**FEW, "max_patches": 6, "do_rescale": False, "do_normalize": False}
    image = noise(height, width)
    if not round(min(height, width) * 64 / max(height, width)):
        with pytest.raises(ValueError, match="nothing is left"):
            PixelProcessor("deepseek_ocr2", FEW, {}).process(np.asarray(image))
        return
    wanted = kind(**own)([image], return_tensors="np")
    found = PixelProcessor("deepseek_ocr2", FEW, {}).process(np.asarray(image))
    assert found.keys() - {"grids"} == wanted.keys()
    for name, array in wanted.items():
        assert np.array_equal(found[name], array), name


@settings(max_examples=15)
@given(height=SIDES, width=SIDES)
@example(height=41, width=17)
@example(height=200, width=100)
def test_tiles_are_in_the_grid_of_the_processor(height: int, width: int) -> None:
    """Of Unlimited-OCR, whose class needs torchvision; bicubic resampling overshoots there."""
    image = noise(height, width)
    if not round(min(height, width) * 64 / max(height, width)):
        return
    wanted = inherited_processor("unlimited_ocr", "UnlimitedOcr", **FEW)([image])
    found = PixelProcessor("deepseek_ocr", FEW, {}).process(np.asarray(image))
    assert found["num_local_patches"].tolist() == wanted["num_local_patches"]
    tiles = int(found["num_local_patches"][0])
    assert not tiles or [found["grids"][0][::-1].tolist()] == wanted["patches_grid"]
    assert ("pixel_values_local" in found) == bool(tiles) == ("pixel_values_local" in wanted)
    for name in ("pixel_values", "pixel_values_local")[: 1 + bool(tiles)]:
        theirs = np.stack([np.asarray(each) for each in wanted[name]])
        off = np.abs(found[name].astype(int) - theirs)
        assert off.shape == theirs.shape and off.max() <= 64 and off.mean() < 2.0


@pytest.mark.parametrize(
    ("layout", "pixels", "message"),
    [
        ("deepseek_ocr", {"size": {"height": 64, "width": 32}}, "one height and width"),
        ("deepseek_ocr", {"tile_size": True}, "tile_size must be a positive number, not True"),
        ("deepseek_ocr", {"crop_to_patches": False}, "crop_to_patches is false"),
        ("deepseek_ocr2", {"tile_size": 640}, "10 and 16 features .* served are 12 and 16"),
        ("got_ocr2", {"size": {"height": 384, "width": 384}}, "384, and image_size .* is 1024"),
    ],
)
def test_settings_that_are_not_served(layout: str, pixels: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        LAYOUTS[layout](ImageSettings({}, pixels))


def test_colours_around_an_image_are_three_bytes() -> None:
    for wrong in ([127], [1, 2, 256], "grey", None):
        with pytest.raises(ModelLoadError, match="background_color must be three bytes"):
            PixelProcessor("deepseek_ocr", {**FEW, "background_color": wrong}, {})
    made = PixelProcessor("deepseek_ocr", {**FEW, "background_color": [1, 2, 3]}, {})
    found = made.process(np.asarray(noise(20, 40)))["pixel_values"][0]
    assert (found[:, 0] == np.array([1, 2, 3])[:, None]).all() and (found[:, 32] > 3).any()


def test_the_tiles_of_published_folders_are_those_of_their_code() -> None:
    """Those of "Gundam", which the model cards of the first one ask for."""
    first, second = (find_pictures({"model_type": kind}) for kind in ("unlimited_ocr", "other"))
    for pictures, tile, most in ((first, 640, 9), (second, 768, 6)):
        said = pictures.image_processor
        assert (said["tile_size"], said["min_patches"], said["max_patches"]) == (tile, 2, most)
        assert said["size"] == {"height": 1024, "width": 1024}
