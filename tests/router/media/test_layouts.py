"""Tokens of an image, for every size: as transformers' own processors write them."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.model.support import changed, places
from tests.router.media.layout_families import CLIP, FAMILIES, UNCOUNTED
from tests.router.media.layout_processors import COUNTS, theirs
from tgi_trio.errors import ModelLoadError, ValidationError
from tgi_trio.model.image_families import IMAGE_FAMILIES, find_family
from tgi_trio.router.media.layouts.layout import ImageLayout, ImageSettings, ImageSize
from tgi_trio.router.media.layouts.table import LAYOUTS
from tgi_trio.router.media.media_model import find_largest, lay_out_images

SIZES = st.tuples(st.integers(1, 4096), st.integers(1, 4096)).map(lambda pair: ImageSize(*pair))


# Families whose processors count features alone, without marks around them.
PLAIN = (
    *("cohere_compass", "exaone", "gemma", "glm", "hyperclovax", "lfm3", "lighton", "llava"),
    *("minimax", "muse", "paddleocr", "paligemma", "qwen"),
)


def ours(name: str) -> ImageLayout:
    family = FAMILIES[name]
    kind = name.partition("/")[0]
    model_type = "llava" if kind == "pixtral" else kind
    config = {"model_type": model_type, **family.config}
    return lay_out(ImageSettings(config, family.pixels, family.options))


def lay_out(settings: ImageSettings) -> ImageLayout:
    return LAYOUTS[find_family(settings.config).layout](settings)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or that it refuses."""
    try:
        return call()
    except (ValidationError, ValueError, ZeroDivisionError):
        return "refused"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - UNCOUNTED))
@given(size=SIZES)
@example(size=ImageSize(1, 1))
@example(size=ImageSize(4096, 1))
@example(size=ImageSize(1, 4096))
@example(size=ImageSize(1, 201))
@example(size=ImageSize(200, 1))
@example(size=ImageSize(364, 364))
@example(size=ImageSize(365, 364))
@example(size=ImageSize(4097, 123))
def test_counts_are_those_of_the_processor(name: str, size: ImageSize) -> None:
    layout, processor = ours(name), theirs(name)

    def expected() -> int:
        count = COUNTS.get(name.partition("/")[0])
        if count is not None:
            return count(processor, size)["num_image_tokens"][0]
        found = processor._get_num_multimodal_tokens(image_sizes=[size])
        if not found["num_image_tokens"][0]:
            raise ValueError("an image of no features")
        return found["num_image_tokens"][0]

    def counted() -> int:
        text = layout.expand(size)
        features = layout.count_features(size)
        marks = sum(map(text.count, layout.mark_tokens))
        assert text.count(layout.feature_token) + marks == features
        if name.startswith(PLAIN):
            return features - marks
        return len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    assert outcome(counted) == outcome(expected)


@pytest.mark.parametrize("name", ["idefics3", "internvl", "llava", "llava_next", "qwen2_vl"])
@given(sides=st.tuples(st.integers(1, 1500), st.integers(1, 1500)))
def test_no_image_that_may_come_takes_many_more_tokens_than_the_largest(
    name: str, sides: tuple[int, int]
) -> None:
    layout, pixels, most, size = ours(name), 1_000_000, 2500, ImageSize(*sides)
    largest = find_largest(layout, pixels, most)
    assert largest is not None and largest.pixels <= pixels
    found = layout.count_features(largest)
    assert found <= most
    if size.pixels <= pixels and max(sides) <= 2 * min(sides):
        tokens = layout.count_features(size)
        assert tokens > most or tokens <= 1.25 * found


def test_every_family_has_a_largest_image_unless_no_prompt_has_room() -> None:
    for name in FAMILIES:
        layout = ours(name)
        largest = find_largest(layout, 20_000_000, 100_000)
        assert largest is not None and 0 < layout.count_features(largest) <= 100_000
    assert find_largest(ours("llava"), 1_000_000, 100) is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize(
    "sizes", [[(30, 50)], [(700, 333), (20, 10)], [(40, 1200)], [(1500, 700)]], ids=str
)
def test_prompts_are_those_of_the_processor(name: str, sizes: list[tuple[int, int]]) -> None:
    """Whole prompts, through pixels: so much is read off what the tower will get."""
    pil = pytest.importorskip("PIL.Image")
    layout, processor = ours(name), theirs(name)
    mark, around = layout.placeholder, ("", "")
    if name.startswith("hunyuan_vl"):  # which wants what templates write around it
        around = layout.around
    parts = [around[0], *[f"{around[1]} Here\n{around[0]}" for _ in sizes]]
    if name == "paligemma":
        parts = [""] * len(parts)
    if name == "lighton_ocr":  # which sees nothing in the smallest
        sizes = [(height + 28, width + 28) for height, width in sizes]
    images = [pil.fromarray(np.zeros((*size, 3), np.uint8)) for size in sizes]

    def expected() -> Any:
        kind = "np" if name.startswith("ovis2") else None  # whose processor reads arrays
        found = processor(text=mark.join(parts), images=[images], return_tensors=kind)
        return list(np.array(found["input_ids"]).reshape(-1))

    def counted() -> Any:
        each = layout.among(len(sizes))
        expanded = [each.number(i) + each.expand(ImageSize(*size)) for i, size in enumerate(sizes)]
        text = parts[0] + "".join(a + b for a, b in zip(expanded, parts[1:], strict=True))
        return processor.tokenizer(layout.finish(text, "<bos>"))["input_ids"]

    assert outcome(counted) == outcome(expected)


def test_every_row_of_the_table_is_tried() -> None:
    tried = {name.partition("/")[0] for name in FAMILIES}
    # By transformers' own classes.
    same = dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"), "qwen3_vl")
    same |= {
        **{"qwen3_omni_moe_thinker": "qwen3_vl", "qwen4_exp": "qwen3_vl"},
        "qwen2_5_vl": "qwen2_vl",
        "glm4v_moe": "glm4v",
        "glm_ocr": "glm46v",
    }
    same |= {"vipllava": "llava", "llava_next_video": "llava_next"}  # and by the same files
    assert {same.get(name, name) for name in IMAGE_FAMILIES} <= tried


@pytest.mark.parametrize(
    ("config", "pixels"),
    [
        ({"model_type": "llava"}, {}),
        ({"model_type": "llava", "vision_config": {"patch_size": 0}}, {}),
        ({"model_type": "llava_next", **CLIP}, {"image_grid_pinpoints": [[1]]}),
        ({"model_type": "llava_onevision", "vision_aspect_ratio": "pad"}, {}),
        ({"model_type": "qwen2_vl"}, {"patch_size": "14"}),
        ({"model_type": "gemma4"}, {"max_soft_tokens": -1}),
        ({"model_type": "gemma4_unified", "sliding_window": 512}, {"max_soft_tokens": 1120}),
        ({"model_type": "paligemma"}, {}),
        ({"model_type": "kimi_k25"}, {"size": {"height": 512, "width": 512}}),
        ({"model_type": "minicpm_ocr"}, {"small_image_upsize": "adaptive"}),
        ({"model_type": "minicpmv4_6"}, {"downsample_mode": "4x"}),  # and not in config.json
        ({"model_type": "minicpmv4_6", "downsample_mode": "8x"}, {"downsample_mode": "8x"}),
        ({"model_type": "minimax_m3_vl"}, {"size": {"height": 672, "width": 672}}),
        ({"model_type": "muse_glimmer"}, {"max_image_tokens": 0}),
        ({"model_type": "step3p7"}, {"size": 728}),
        *(
            ({"model_type": "hunyuan_vl"}, {f"{kind}_patch_size": 2})
            for kind in ("temporal", "spatial")
        ),
        ({"model_type": "hunyuan_vl"}, {"size": {"height": 512, "width": 512}}),
        ({"model_type": "granite_docling"}, {"fine_route": True}),
        ({"model_type": "granite_docling"}, {"dense_max_patches": 2.5}),
        ({"model_type": "granite_docling"}, {"dense_min_aspect": "wide"}),
        ({"model_type": "granite_docling"}, {"size": {"height": 512, "width": 256}}),
        *(({"model_type": kind}, {"patch_expand_factor": 2}) for kind in ("glm5_next", "glmga")),
    ],
)
def test_settings_that_say_too_little(config: dict[str, Any], pixels: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError):
        lay_out(ImageSettings(config, pixels))


def test_so_many_tiles_that_no_image_is_cut_into_them() -> None:
    config = {"model_type": "internvl", **FAMILIES["internvl"].config}
    pixels = FAMILIES["internvl"].pixels | {"max_patches": 10**8}
    with pytest.raises(ModelLoadError, match="cut into up to 100000000 tiles, more than 256"):
        lay_out_images(ImageSettings(config, pixels, FAMILIES["internvl"].options), "internvl")


# What may stand anywhere: JSON has no infinity and no NaN, but Python writes and reads both.
ANYTHING: list[Any] = [None, True, "x", -1, 0, 3, 0.5, 10**8, inf, nan, [], [1], ["x"], {}]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_any_value_in_any_setting_is_laid_out_or_refused(name: str) -> None:
    family = FAMILIES[name]
    kind = name.partition("/")[0]
    config = {"model_type": "llava" if kind == "pixtral" else kind, **family.config}
    whole = {"config": config, "pixels": family.pixels, "options": family.options}
    key = find_family(config).layout
    cases = [(path, value) for path in places(whole) if len(path) > 1 for value in ANYTHING]
    draw = random.Random(name)
    for path, value in draw.sample(cases, min(len(cases), 40)):
        said = changed(whole, path, value)
        settings = ImageSettings(said["config"], said["pixels"], said["options"])
        with suppress(ModelLoadError, ValidationError):
            find_largest(lay_out_images(settings, key), 1 << 24, 4096)
