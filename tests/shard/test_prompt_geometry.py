"""What images change of a prompt's tokens, against transformers' own positions and turns."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.images import ArenaPlace, SequenceImage
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.image_rules import ImageRules, image_rules
from tgi_trio.model.reading import with_sections
from tgi_trio.model.specs.decoder import RotarySpec
from tgi_trio.shard.media.prompt_geometry import (
    BundleGrid,
    ImageGrid,
    PromptGeometry,
    shape_prompt,
    turn_by_grids,
)
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary

FAMILIES = ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"]
MERGE = 2
ROTARIES = {
    "Qwen2VL": ("qwen2_vl", "Qwen2VLRotaryEmbedding"),
    "Qwen3VL": ("qwen3_vl", "Qwen3VLTextRotaryEmbedding"),
}
# Text before each image, and its rows and columns.
IMAGES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3
)


@cache
def index_of(family: str) -> Any:
    """Return a family's `get_rope_index`, of a model without weights."""
    import transformers

    config = getattr(transformers, f"{family}Config")()
    config.vision_config.spatial_merge_size = MERGE
    config.vision_config.tokens_per_second = BY_SECOND  # which Qwen2.5-VL alone reads
    kind = getattr(transformers, f"{family}Model")
    stand_in = kind.__new__(kind)
    torch.nn.Module.__init__(stand_in)
    stand_in.config = config
    return stand_in.get_rope_index


@pytest.mark.parametrize("family", FAMILIES)
@given(images=IMAGES, behind=st.integers(0, 4))
@settings(max_examples=15, deadline=None)
def test_positions_are_those_of_transformers(
    family: str, images: list[tuple[int, int, int]], behind: int
) -> None:
    grids, kinds = [], []
    for text, rows, columns in images:
        kinds += [0] * text
        grids.append(ImageGrid(len(kinds), rows, columns))
        kinds += [1] * (rows * columns)
    kinds += [0] * behind
    expected, delta = index_of(family)(
        torch.zeros((1, len(kinds)), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([kinds]),
        image_grid_thw=torch.tensor([[1, g.rows * MERGE, g.columns * MERGE] for g in grids]),
    )
    geometry = PromptGeometry(turns=turn_by_grids(grids))
    assert geometry.delta == int(delta)
    found = np.tile(np.arange(len(kinds)) + geometry.delta, (3, 1))
    geometry.turn(0, found)
    np.testing.assert_array_equal(found, expected[:, 0].numpy())
    later = np.tile(np.arange(2, len(kinds)) + geometry.delta, (3, 1))
    geometry.turn(2, later)
    np.testing.assert_array_equal(later, found[:, 2:])


# Text before each video, its grids, their rows and columns, and seconds from one to the next.
VIDEOS = st.lists(
    st.tuples(
        *(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5)),
        st.sampled_from([0.25, 0.5, 1.0, 1.15, 2.5, 2 / 3.1]),
    ),
    min_size=1,
    max_size=2,
)
BY_SECOND = 4


def bundles_of(
    videos: list[tuple[int, int, int, int, float]], by_second: bool, apart: bool, between: int
) -> tuple[list[int], list[SequenceImage], list[BundleGrid]]:
    """Return kinds of tokens, the videos among them, and their grids; `between`: text of a mark."""
    kinds: list[int] = []
    placed, grids = [], []
    for text, count, rows, columns, seconds in videos:
        kinds += [0] * (text + between)
        first, size = len(kinds), rows * columns
        runs = [(i * (size + 1), size) for i in range(count)] if apart else [(0, count * size)]
        for i in range(len(runs)):
            kinds += [0] * (apart and i > 0) + [2] * runs[i][1]
        tokens = len(kinds) - first
        placed.append(SequenceImage(first, tokens, tuple(runs), bytes(32), ArenaPlace(0, 0)))
        interval = float(np.float32(BY_SECOND) * np.float32(seconds)) if by_second else 1.0
        grids.append(BundleGrid(rows, columns, count, interval))
        kinds += [0] * between
    return kinds, placed, grids


@pytest.mark.parametrize("family", FAMILIES)
@given(videos=VIDEOS, behind=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_positions_of_videos_are_those_of_transformers(
    family: str, videos: list[tuple[int, int, int, int, float]], behind: int
) -> None:
    """Where no video lasts longer than its sides are: behind others its `get_rope_index` fails."""
    by_second, apart = family == "Qwen2_5_VL", family == "Qwen3VL"
    step = BY_SECOND if by_second else 1
    for _, count, rows, columns, seconds in videos:
        last = int((count - 1) * step * (seconds if by_second else 1))
        assume(apart or last < max(rows, columns))
    kinds, placed, grids = bundles_of(videos, by_second, apart, 0)
    kinds += [0] * behind
    index = index_of(family)
    given = {"second_per_grid_ts": torch.tensor([v[4] for v in videos])} if by_second else {}
    expected, delta = index(
        torch.zeros((1, len(kinds)), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([kinds]),
        video_grid_thw=torch.tensor([[g.grids, g.rows * MERGE, g.columns * MERGE] for g in grids]),
        **given,
    )
    geometry = shape_prompt(ImageRules(merge=MERGE), placed, grids, len(kinds))
    assert geometry is not None and geometry.delta == int(delta)
    found = np.tile(np.arange(len(kinds)) + geometry.delta, (3, 1))
    geometry.turn(0, found)
    np.testing.assert_array_equal(found, expected[:, 0].numpy())


@given(videos=VIDEOS, behind=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_text_behind_a_long_video_is_where_qwen2_5_omni_has_it(
    videos: list[tuple[int, int, int, int, float]], behind: int
) -> None:
    """transformers' class for the same positions by seconds, which counts a video's own."""
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni

    kinds, placed, grids = bundles_of(videos, True, False, 1)
    pairs = zip(grids, videos, strict=True)
    grids = [grid._replace(interval=video[4], more=BY_SECOND) for grid, video in pairs]
    kinds += [0] * behind
    kind = omni.Qwen2_5OmniPreTrainedModelForConditionalGeneration
    stand_in: Any = kind.__new__(kind)
    torch.nn.Module.__init__(stand_in)
    stand_in.spatial_merge_size = MERGE
    stand_in.config = SimpleNamespace(
        **{"image_token_id": 90, "video_token_id": 2, "audio_token_id": 91},
        **{"vision_start_token_id": 92, "audio_start_token_id": 93},
        **{"position_id_per_seconds": BY_SECOND, "seconds_per_chunk": 2},
    )
    ids = np.array(kinds)
    ids[[each.first - 1 for each in placed]] = 92
    try:
        geometry = shape_prompt(ImageRules(merge=MERGE), placed, grids, len(kinds))
    except ValueError as error:
        assert "more seconds than it has tokens" in str(error)
        return
    expected, _ = stand_in.get_rope_index(
        torch.from_numpy(ids)[None],
        video_grid_thw=torch.tensor([[g.grids, g.rows * MERGE, g.columns * MERGE] for g in grids]),
        second_per_grids=torch.tensor([each[4] for each in videos]),
    )
    assert geometry is not None
    found = np.tile(np.arange(len(kinds)) + geometry.delta, (3, 1))
    geometry.turn(0, found)
    np.testing.assert_array_equal(found, expected[:, 0].numpy())


@pytest.mark.parametrize(
    ("family", "sections", "alternate"),
    [("Qwen2VL", (2, 3, 3), False), ("Qwen3VL", (3, 3, 2), True), ("Qwen3VL", (2, 4, 2), True)],
)
@pytest.mark.parametrize("kept", [False, True], ids=["computed", "kept"])
def test_turns_are_those_of_transformers(
    family: str, sections: tuple[int, int, int], alternate: bool, kept: bool
) -> None:
    import transformers

    kind, name = ROTARIES[family]
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    config = getattr(transformers, f"{family}TextConfig")(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
            "mrope_section": list(sections),
        },
    )
    theirs = getattr(module, name)(config)
    positions = torch.from_numpy(turn_by_grids([ImageGrid(3, 2, 4), ImageGrid(13, 5, 2)]))
    cos, sin = theirs(torch.zeros(1), positions[:, None])
    spec = RotarySpec(dim=16, theta=100.0, parameters={"mrope_section": sections})
    ours = Rotary(with_sections(spec, (1, 1, 1), alternate=alternate), torch.device("cpu"))
    if kept:
        ours.keep(32, torch.float32)
    every = positions[0]
    found_cos, found_sin, *_ = ours.table(positions, every, torch.float32)
    torch.testing.assert_close(found_cos[:, 0], cos[0])
    torch.testing.assert_close(found_sin[:, 0, 8:], sin[0, :, 8:])
    torch.testing.assert_close(found_sin[:, 0, :8], -sin[0, :, :8])
    alike = torch.arange(9)
    for plain, three in zip(
        ours.table(alike, alike, torch.float32)[:2],
        ours.table(alike.expand(3, -1), alike, torch.float32)[:2],
        strict=True,
    ):
        torch.testing.assert_close(plain, three, rtol=0, atol=0)


def test_sections_that_do_not_make_up_a_head_are_refused() -> None:
    spec = RotarySpec(dim=16, parameters={"mrope_section": [2, 2, 2]})
    with pytest.raises(ModelLoadError, match="add up to 8"):
        with_sections(spec, (2, 3, 3), alternate=False)


def test_spans_are_seen_whole_and_never_cut() -> None:
    geometry = PromptGeometry(spans=np.array([[3, 6], [6, 8], [10, 14]]))
    assert geometry.delta == 0
    lasts = geometry.lasts(np.arange(16))
    assert lasts.tolist() == [0, 1, 2, 5, 5, 5, 7, 7, 8, 9, 13, 13, 13, 13, 14, 15]
    assert geometry.lasts(np.array([12])).tolist() == [13]
    for first, count, fits in [
        (0, 3, 3),  # up to a span
        (0, 4, 3),
        (0, 6, 6),  # up to its end, where the next begins
        (0, 7, 6),
        (3, 2, 0),  # less than a span
        (4, 2, 2),  # what is left of one
        (8, 3, 2),
        (8, 9, 9),
    ]:
        assert geometry.fit(first, count) == fits, (first, count)
    assert [geometry.least(first) for first in (2, 3, 4, 6, 9, 13, 14)] == [1, 3, 2, 2, 1, 1, 1]


def test_a_prompt_is_shaped_by_its_models_rules() -> None:
    place = ArenaPlace(0, 64)
    images = [
        SequenceImage(2, 8, ((1, 6),), b"", place),
        SequenceImage(12, 7, ((0, 2), (3, 4)), b"", place),
    ]
    assert shape_prompt(ImageRules("image"), [], [], 9) is None
    assert shape_prompt(ImageRules(), images, [], 20) is None
    whole = shape_prompt(ImageRules("prompt"), images, [], 20)
    assert whole is not None and whole.spans.tolist() == [[0, 20]]
    several = shape_prompt(ImageRules("image"), images, [], 20)
    assert several is not None and several.spans.tolist() == [[3, 9], [12, 14], [15, 19]]
    turned = shape_prompt(ImageRules(merge=2), images[:1], [BundleGrid(2, 3)], 20)
    assert turned is not None and turned.turns is not None
    np.testing.assert_array_equal(turned.turns, turn_by_grids([ImageGrid(3, 2, 3)]))
    for grid, wrong in ((BundleGrid(2, 2), images[:1]), (BundleGrid(2, 3), images[1:])):
        with pytest.raises(ValueError, match="features has 6 tokens"):
            shape_prompt(ImageRules(merge=2), wrong, [grid], 20)


@pytest.mark.parametrize(
    ("family", "rules"),
    [
        ("gemma3", ImageRules("image")),
        ("paligemma", ImageRules("prompt")),
        ("qwen2_vl", ImageRules(merge=2)),
        ("qwen2_5_vl", ImageRules(merge=2, by_second=4)),
        ("qwen3_vl", ImageRules(merge=3)),
        (
            "qwen2_5_omni_thinker",
            ImageRules(merge=2, by_second=25, seconds_first=True),
        ),
        ("llava", ImageRules()),
    ],
)
def test_a_familys_rules(family: str, rules: ImageRules) -> None:
    vision = {"spatial_merge_size": rules.merge} if rules.merge == 3 else {}
    config = ModelConfig(Path(), family, None, 0, 0, (), {"vision_config": vision})
    assert image_rules(config) == rules


@pytest.mark.parametrize("vision", ["none", {"spatial_merge_size": 0}])
def test_rules_that_make_no_sense(vision: Any) -> None:
    config = ModelConfig(Path(), "qwen2_vl", None, 0, 0, (), {"vision_config": vision})
    with pytest.raises(ModelLoadError, match=r"spatial_merge_size .* no positive number"):
        image_rules(config)


def test_the_first_of_several_ends_is_what_ends_an_image() -> None:
    values: dict[str, Any] = {"eos_token_id": [7, 2]}
    config = ModelConfig(Path(), "idefics", None, 0, 0, (), values)
    assert image_rules(config).end_token == 7
    config = ModelConfig(Path(), "idefics", None, 0, 0, (), {"eos_token_id": "x"})
    with pytest.raises(ModelLoadError, match="cannot be right about images"):
        image_rules(config)
