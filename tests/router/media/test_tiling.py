"""Tiles are cut as torchvision's processors cut them, to the pixel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.router.media.image_files import noise
from tests.router.media.torchvision_processors import TorchProcessor, inherited_processor
from tgi_trio.errors import ModelLoadError
from tgi_trio.media.processors import PixelProcessor
from tgi_trio.router.media.decoder import DecoderSettings

TILES = {"size": {"height": 24, "width": 24}, "max_patches": 6}


TORCHVISION = {
    "cohere2_vision": DecoderSettings("cohere2", TILES),
    "cohere2_vision/whole": DecoderSettings("cohere2", {**TILES, "crop_to_patches": False}),
    "llama4": DecoderSettings("llama4", TILES),
    "llama4/largest": DecoderSettings("llama4", {**TILES, "resize_to_max_canvas": True}),
}


@pytest.mark.parametrize("name", TORCHVISION)
@settings(max_examples=40)
@given(height=st.integers(1, 160), width=st.integers(1, 160))
@example(height=99, width=99)  # which float32 makes a pixel of
@example(height=24, width=24)
@example(height=1, width=160)
def test_tiles_are_those_that_torchvision_makes(name: str, height: int, width: int) -> None:
    """But for rounding, and where bicubic resampling overshoots: it is cut off between passes."""
    image, asked = noise(height, width), TORCHVISION[name]
    family = name.partition("/")[0]
    kind = {"cohere2_vision": "Cohere2Vision", "llama4": "Llama4"}[family]
    wanted = TorchProcessor(family, kind, **asked.settings).pixels(image)
    found = PixelProcessor(asked.family, asked.settings, {}).process(np.asarray(image))
    assert found.keys() == {"pixel_values"} and found["pixel_values"].dtype == np.uint8
    off = np.abs(found["pixel_values"].astype(int) - wanted)
    assert found["pixel_values"].shape == wanted.shape
    most, mean = (2, 0.5) if family == "llama4" else (32, 1.0)  # of 255, for noise
    assert off.max() <= most and off.mean() < mean


PARTS = {"tile_size": 32, "encoder_patch_size": 8, "max_image_tokens": 9, "min_image_tokens": 2}


@settings(max_examples=40)
@given(height=st.integers(16, 160), width=st.integers(16, 160))
@example(height=32, width=32)
@example(height=160, width=20)
def test_patches_are_those_that_torchvision_makes(height: int, width: int) -> None:
    """Of LFM2-VL, but for rounding and for room that no part of the image needs."""
    image = noise(height, width)
    wanted = inherited_processor("lfm2_vl", "Lfm2Vl", **PARTS)([image], return_tensors="np")
    found = PixelProcessor("lfm2", PARTS, {}).process(np.asarray(image))
    assert found.keys() == wanted.keys() and found["pixel_values"].dtype == np.uint8
    assert np.array_equal(found["spatial_shapes"], wanted["spatial_shapes"])
    counts, mask = found["spatial_shapes"].prod(axis=1), found["pixel_attention_mask"]
    room = mask.shape[1]
    assert room == counts.max() and np.array_equal(mask, wanted["pixel_attention_mask"][:, :room])
    off = found["pixel_values"].astype(int) - wanted["pixel_values"][:, :room]
    assert np.abs(off).max() <= 2 and not wanted["pixel_values"][:, room:].any()


STEP = {"size": {"height": 64, "width": 64}, "patch_size": 40, "max_image_size": 150}


KIMI = {"size": {"max_height": 12, "max_width": 12}, "max_patches": 60}


GRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma4_unified": (
        *("Gemma4Unified", "gemma4_unified"),
        {"patch_size": 3, "pooling_kernel_size": 2, "max_soft_tokens": 70},
    ),
    "kimi_k25": ("Kimi_K25", "kimi", KIMI),
    "minicpm_ocr": (
        *("MiniCPMOcr", "minicpm_ocr"),
        {"scale_resolution": 60, "patch_size": 8, "max_slice_nums": 4},
    ),
    "minimax_m3_vl": ("MiniMaxM3VL", "minimax_m3", {"min_pixels": 3136, "max_pixels": 20_000}),
    "minimax_m3_vl/published": ("MiniMaxM3VL", "minimax_m3", {"size": [672, 672]}),
    "muse_glimmer": ("MuseGlimmer", "muse", {"patch_size": 8, "max_image_tokens": 40}),
    "nemotron_h_omni": (
        *("NemotronH_Omni_Reasoning_V3", "nemotron"),
        {"patch_size": 8, "min_num_patches": 20, "max_num_patches": 70},
    ),
    "perception_lm": ("PerceptionLM", "perception_lm", {"tile_size": 24, "max_num_tiles": 5}),
    "step3p7": ("Step3p7", "step3p7", STEP),
}


VIEWS = ("pixel_values", "pixel_values_local")


@pytest.mark.parametrize("name", GRIDS)
@settings(max_examples=12)
@given(height=st.integers(1, 200), width=st.integers(1, 200))
@example(height=20, width=200)  # which Step 3.7 makes a square
@example(height=64, width=64)
@example(height=64, width=30)
@example(height=200, width=199)
def test_views_are_those_that_torchvision_makes(name: str, height: int, width: int) -> None:
    """But for rounding, and where bicubic and Lanczos resampling overshoot."""
    kind, family, given_settings = GRIDS[name]
    image = noise(height, width)
    module = name.partition("/")[0]
    wanted = inherited_processor(module, kind, **given_settings)([image], return_tensors="np")
    found = PixelProcessor(family, given_settings, {}).process(np.asarray(image))
    assert found.keys() == wanted.keys() - {"patch_newline_masks"}
    for part, array in found.items():
        theirs = np.asarray(wanted[part])
        if part == "image_position_ids":  # behind which there is room for larger images
            assert (theirs[:, array.shape[1] :] == -1).all()
        if name == "gemma4_unified" and part != "num_soft_tokens_per_image":
            theirs = theirs[:, : array.shape[1]]
        assert array.shape == theirs.shape
        off = np.abs(array.astype(int) - theirs)
        assert (array == array.astype(np.uint8)).all() and (part in VIEWS or not off.any())
        most, mean = (2, 0.5) if name == "step3p7" else (64, 2.0)  # of 255, for noise
        assert off.max() <= most and off.mean() < mean


@settings(max_examples=12, deadline=None)
@given(height=st.integers(20, 1200), width=st.integers(20, 1200))
@example(height=448, width=448)
@example(height=1190, width=30)
def test_crops_are_those_that_torchvision_makes(height: int, width: int) -> None:
    """Of Phi-4-multimodal, but for rounding; the view of the whole, which comes first there, is the
    shard's to make.
    """
    image, asked = noise(height, width), {"dynamic_hd": 3}
    module = "phi4_multimodal"
    wanted = inherited_processor(module, "Phi4Multimodal", **asked)([image], return_tensors="np")
    found = PixelProcessor("phi4", asked, {}).process(np.asarray(image))
    assert np.array_equal(found["image_sizes"], wanted["image_sizes"])
    assert np.array_equal(found["pixel_attention_mask"], wanted["image_attention_mask"][0, 1:])
    crops = wanted["image_pixel_values"][0, 1:]
    off = np.abs(found["pixel_values"].astype(int) - crops)
    assert found["pixel_values"].shape == crops.shape and off.max() <= 1


@pytest.mark.parametrize(
    ("family", "wrong", "why"),
    [
        ("phi4", {"size": {"height": 336, "width": 336}}, "served are crops of 448 pixels"),
        ("phi4", {"patch_size": 16}, "patch_size 16; served are crops of 448 pixels and patches"),
        ("phi4", {"dynamic_hd": 0}, "dynamic_hd must be a positive number, not 0"),
        ("gemma4_unified", {"max_soft_tokens": 0}, "max_soft_tokens must be positive numbers"),
        ("muse", {"patch_size": True}, "patch_size, .* must be positive numbers"),
        ("step3p7", {"size": 728}, "size must be a positive number, not None"),
        ("step3p7", {"max_image_size": "any"}, "max_image_size must be a positive number"),
        ("llama4", {"size": {"height": 24, "width": 16}}, "one height and width"),
        ("cohere2", {"size": {"height": True, "width": True}}, "one height and width"),
        ("perception_lm", {"max_num_tiles": 0}, "tile_size, max_num_tiles must be positive"),
        ("llama4", {"max_patches": 0}, "max_patches must be a positive number, not 0"),
        ("cohere2", {"resample": "sharp"}, "resample must be a number of Pillow's, not 'sharp'"),
        ("lfm2", {"resample": 9}, "resample must be a number of Pillow's, not 9"),
        ("lfm2", {"min_tiles": 11}, "min_tiles 11 is more than max_tiles 10"),
        ("lfm2", {"tile_size": 500}, "tile_size 500 is no multiple of 32"),
        ("lfm2", {"max_image_tokens": "many"}, "max_image_tokens must be a positive number"),
        ("lfm2", {"max_pixels_tolerance": "some"}, "max_pixels_tolerance must be a number"),
    ],
)
def test_settings_of_tiles_are_checked(family: str, wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelLoadError, match=why):
        PixelProcessor(family, wrong, {})
