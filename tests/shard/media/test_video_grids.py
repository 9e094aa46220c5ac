"""The grids of a video, a few at a time, are what the tower makes of all of them together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.shard.media.images_support import Maker
from tgi_trio.shard.media import video_grids
from tgi_trio.shard.media.features import Bundle, ImageFeatures
from tgi_trio.shard.media.video_grids import join_features, split_grids

GRID = np.array([[5, 2, 4]], np.int32)  # frames, rows, columns of patches
PIXELS = np.arange(40 * 3, dtype=np.uint8).reshape(40, 3)


@pytest.mark.parametrize(("together", "counts"), [(1, [1] * 5), (16, [2, 2, 1]), (40, [5])])
def test_grids_are_split_into_those_that_fit(
    monkeypatch: pytest.MonkeyPatch, together: int, counts: list[int]
) -> None:
    monkeypatch.setattr(video_grids, "_TOGETHER", together)
    parts = list(split_grids({"pixel_values": PIXELS, "image_grid_thw": GRID}))
    assert [part["image_grid_thw"].tolist() for part in parts] == [[[1, 2, 4]] * n for n in counts]
    np.testing.assert_array_equal(np.concatenate([p["pixel_values"] for p in parts]), PIXELS)


def test_what_is_no_video_is_one_part_and_a_wrong_one_none() -> None:
    image: Bundle = {"pixel_values": PIXELS[:8], "image_grid_thw": np.array([[1, 2, 4]], np.int32)}
    assert list(split_grids(image)) == [image]
    assert list(split_grids({"pixel_values": PIXELS})) == [{"pixel_values": PIXELS}]
    with pytest.raises(ValueError, match="5 grids of 2 x 4 patches has 39"):
        list(split_grids({"pixel_values": PIXELS[1:], "image_grid_thw": GRID}))


@pytest.mark.parametrize(("together", "counts"), [(1, [1] * 5), (130, [2, 2, 1]), (9999, [5])])
@pytest.mark.parametrize("batch", [(), (1,)])
def test_frames_are_split_into_those_that_fit(
    monkeypatch: pytest.MonkeyPatch, batch: tuple[int, ...], together: int, counts: list[int]
) -> None:
    monkeypatch.setattr(video_grids, "_PIXELS_TOGETHER", together)
    pixels = np.arange(5 * 3 * 64).astype(np.uint8).reshape(*batch, 5, 3, 8, 8)
    parts = list(split_grids({"pixel_values": pixels, "num_frames": np.array([5], np.int32)}))
    assert [part["pixel_values"].shape[len(batch)] for part in parts] == counts
    joined = np.concatenate([part["pixel_values"] for part in parts], axis=len(batch))
    np.testing.assert_array_equal(joined, pixels)


@pytest.mark.parametrize("family", ["internvl", "smolvlm"])
def test_a_tower_says_of_frames_what_it_says_of_all_together(
    model: Maker, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    own = model(family)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 16, 16), np.uint8)
    shown = pixels[None] if family == "smolvlm" else pixels
    bundle = {"pixel_values": shown, "num_frames": np.array([5], np.int32)}
    (together,) = split_grids(bundle)
    whole = own.tower.encode(together)
    monkeypatch.setattr(video_grids, "_PIXELS_TOGETHER", 600)
    parts = join_features([own.tower.encode(part) for part in split_grids(bundle)])
    assert whole.rows.shape[0] == 5
    np.testing.assert_allclose(parts.rows, whole.rows, rtol=1e-4, atol=1e-5)


def test_features_are_joined_in_their_order() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    parts = [ImageFeatures(rows[:2], {1: -rows[:2]}), ImageFeatures(rows[2:], {1: -rows[2:]})]
    joined = join_features(parts)
    np.testing.assert_array_equal(joined.rows, rows)
    np.testing.assert_array_equal(joined.deep[1], -rows)


@pytest.mark.parametrize("family", ["glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_a_tower_says_of_parts_what_it_says_of_the_whole(
    model: Maker, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    own = model(family)
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (3 * 4 * 8, 2 * 3 * 16), np.uint8)
    bundle = {"pixel_values": pixels, "image_grid_thw": np.array([[3, 4, 8]], np.int32)}
    (together,) = split_grids(bundle)
    whole = own.tower.encode(together)
    monkeypatch.setattr(video_grids, "_TOGETHER", 1)
    parts = join_features([own.tower.encode(part) for part in split_grids(bundle)])
    assert whole.rows.shape == parts.rows.shape == (3 * 8, whole.rows.shape[1])
    for found, expected in (
        (parts.rows, whole.rows),
        *((parts.deep[layer], rows) for layer, rows in whole.deep.items()),
    ):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
