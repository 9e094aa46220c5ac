"""Positions of images on canvases and of the marks around them, against transformers' own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.image_rules import ImageRules, image_rules
from tgi_trio.shard.media.prompt_geometry import ImageGrid, PromptGeometry
from tgi_trio.shard.positions.canvas_turns import turn_by_canvases

IMAGE, BEGIN, END, SLICE, SLICE_END, NEWLINE, TEXT = range(7)
MARKS = frozenset({BEGIN, END, SLICE, SLICE_END, NEWLINE})
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9))
# Before an image, text or marks; its whole; its slices' rows and columns, and the size of each.
IMAGES = st.lists(
    st.tuples(
        st.lists(st.sampled_from([TEXT, NEWLINE]), max_size=3),
        SIZES,
        st.tuples(st.integers(0, 3), st.integers(1, 3)),
        SIZES,
    ),
    min_size=1,
    max_size=3,
)


@cache
def index() -> Any:
    """Return `get_rope_index`, of a model without weights."""
    from transformers import MiniCPMV4_7Model

    stand_in: Any = MiniCPMV4_7Model.__new__(MiniCPMV4_7Model)
    torch.nn.Module.__init__(stand_in)
    stand_in.config = SimpleNamespace(
        **{"downsample_mode": "16x", "newline_id": NEWLINE},
        **{"image_start_id": BEGIN, "image_end_id": END},
        **{"slice_start_id": SLICE, "slice_end_id": SLICE_END},
    )
    return stand_in.get_rope_index


@given(images=IMAGES, behind=st.lists(st.sampled_from([TEXT, NEWLINE]), max_size=3))
@example(images=[([TEXT], (5, 7), (2, 3), (4, 3)), ([], (1, 1), (0, 1), (1, 1))], behind=[])
@example(images=[([], (9, 2), (1, 2), (8, 8))], behind=[NEWLINE, NEWLINE])
@settings(max_examples=60, deadline=None)
def test_positions_are_those_of_transformers(images: list[Any], behind: list[int]) -> None:
    ids: list[int] = []
    parts: list[list[ImageGrid]] = []
    for before, whole, (rows, columns), size in images:
        ids += [*before, BEGIN]
        own = [ImageGrid(len(ids), *whole)]
        ids += [IMAGE] * (whole[0] * whole[1]) + [END]
        for row in range(rows):
            ids += [NEWLINE] * bool(row)
            for _ in range(columns):
                own.append(ImageGrid(len(ids) + 1, *size))
                ids += [SLICE, *[IMAGE] * (size[0] * size[1]), SLICE_END]
        parts.append(own)
    ids += behind
    expected, delta = index()(
        torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([[int(id == IMAGE) for id in ids]]),
        target_sizes=torch.tensor([[4 * p.rows, 4 * p.columns] for own in parts for p in own]),
    )
    geometry = PromptGeometry(turns=turn_by_canvases(np.array(ids, np.int32), parts, MARKS))
    assert geometry.delta == int(delta)
    found = np.tile(np.arange(len(ids)) + geometry.delta, (3, 1))
    geometry.turn(0, found)
    np.testing.assert_array_equal(found, expected[:, 0].numpy())


def test_the_rules_need_the_ids_of_all_marks() -> None:
    names = ("image_start", "image_end", "slice_start", "slice_end", "newline")
    values: dict[str, Any] = {f"{name}_id": i for i, name in enumerate(names, start=BEGIN)}
    values |= {"downsample_mode": "4x"}
    config = ModelConfig(Path(), "minicpmv4_7", None, 0, 0, (), values)
    assert image_rules(config) == ImageRules(merge=2, marks=MARKS)
    assert image_rules(replace(config, values={**values, "downsample_mode": None})).merge == 4
    with pytest.raises(ModelLoadError, match="'newline_id', which model type 'minicpmv4_7' needs"):
        image_rules(replace(config, values={**values, "newline_id": None}))
