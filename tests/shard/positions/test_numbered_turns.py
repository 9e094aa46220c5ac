"""Positions of numbered images, against transformers' own of Hunyuan VL."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.ipc.images import ArenaPlace, SequenceImage
from tgi_trio.shard.media.prompt_geometry import BundleGrid, PromptGeometry
from tgi_trio.shard.positions.numbered_turns import turn_by_numbers

MERGE = 2
# Text before each image, and its rows and columns.
IMAGES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3
)


@cache
def index_of(parts: int) -> Any:
    """Return `get_rope_index` of a model without weights, whose positions have so many parts."""
    from transformers.models.hunyuan_vl import configuration_hunyuan_vl as configurations
    from transformers.models.hunyuan_vl import modeling_hunyuan_vl as models

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2] * parts}
    config = configurations.HunYuanVLConfig(
        text_config={"head_dim": 4 * parts, "rope_parameters": rope},
        vision_config={"spatial_merge_size": MERGE},
    )
    stand_in: Any = models.HunYuanVLModel.__new__(models.HunYuanVLModel)
    torch.nn.Module.__init__(stand_in)
    stand_in.config = config
    return stand_in.get_rope_index


def place(at: int, count: int) -> SequenceImage:
    return SequenceImage(at, count, ((0, count),), bytes(32), ArenaPlace(0, 0))


@given(images=IMAGES, behind=st.integers(0, 4), parts=st.integers(3, 5))
@settings(max_examples=40, deadline=None)
def test_positions_are_those_of_transformers(
    images: list[tuple[int, int, int]], behind: int, parts: int
) -> None:
    kinds: list[int] = []
    placed, grids = [], []
    for text, rows, columns in images:
        kinds += [0] * text
        count = rows * (columns + 1) + 2
        placed.append(place(len(kinds), count))
        grids.append(BundleGrid(rows, columns))
        kinds += [1] * count
    kinds += [0] * behind
    expected, delta = index_of(parts)(
        torch.zeros((1, len(kinds)), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([kinds]),
        image_grid_thw=torch.tensor([[1, g.rows * MERGE, g.columns * MERGE] for g in grids]),
    )
    geometry = PromptGeometry(turn_by_numbers(placed, grids, parts))
    assert geometry.delta == int(delta) == 0, "text does not lag"
    assert geometry.parts == parts
    found = np.tile(np.arange(len(kinds)), (parts, 1))
    geometry.turn(0, found)
    np.testing.assert_array_equal(found, expected[:, 0].numpy())


def test_tokens_that_are_not_those_of_a_grid() -> None:
    whole, grid = place(3, 2 * 4 + 2), BundleGrid(2, 3)
    turn_by_numbers([whole], [grid], 4)
    cut = replace(whole, runs=((0, 4), (5, 5)))
    for image, other in ((place(3, 9), grid), (cut, grid), (whole, BundleGrid(1, 3, 2))):
        with pytest.raises(ValueError, match="features and their marks has runs of"):
            turn_by_numbers([image], [other], 4)
