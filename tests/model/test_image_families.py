"""The families whose images are served: what the router has of each, and what the shard has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.shard.images.pictures import FAMILIES
from tgi_trio.errors import ModelLoadError
from tgi_trio.images.processors import PROCESSORS
from tgi_trio.launcher import find_served_images
from tgi_trio.model.image_families import IMAGE_FAMILIES, find_family
from tgi_trio.router.images.layouts.table import LAYOUTS


def test_router_and_shard_have_the_same_families() -> None:
    rows = IMAGE_FAMILIES.values()
    assert {row.layout for row in rows} == LAYOUTS.keys()
    assert {row.processor for row in rows} == PROCESSORS.keys()
    assert set(FAMILIES) == IMAGE_FAMILIES.keys(), "each is held to transformers' whole model"


def test_pixtral_is_known_by_its_tower() -> None:
    pixtral = {"model_type": "llava", "vision_config": {"model_type": "pixtral"}}
    assert find_family(pixtral) is IMAGE_FAMILIES["pixtral"]
    assert find_family({"model_type": "llava"}) is IMAGE_FAMILIES["llava"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("florence2", "has no vision tower here"),
        ("gemma3n", "has a tower of the package timm"),
        ("perception_lm", "has its pixels made by torchvision alone"),
        ("llava_onevision", "writes an image otherwise where a prompt has several"),
    ],
)
def test_others_are_refused_by_name(kind: str, why: str) -> None:
    with pytest.raises(
        ModelLoadError, match=f"'{kind}' {why}.*; served are images of aya_vision, "
    ):
        find_family({"model_type": kind})


def test_a_server_knows_why_it_shows_none(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama"}))
    assert find_served_images(tmp_path) == (None, None)
    config.write_text(json.dumps({"model_type": "florence2", "vision_config": {"depth": [1]}}))
    model, why = find_served_images(tmp_path)
    assert model is None and why is not None and "model type 'florence2'" in why


def test_a_text_that_is_not_ours_is_known_before_a_shard_starts(tmp_path: Path) -> None:
    """Gemma 4 whose prompts see both ways is transformers' to compute."""
    vision = {"model_type": "gemma4_vision"}
    text = {"model_type": "gemma4_text", "use_bidirectional_attention": "all"}
    whole = {"model_type": "gemma4", "text_config": text, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "preprocessor_config.json").write_text('{"image_seq_length": 4}')
    model, why = find_served_images(tmp_path)
    assert model is None and why is not None and "the text of this gemma4 as a whole" in why


def test_the_documents_list_them_all() -> None:
    text = (Path(__file__).parents[2] / "docs" / "images.md").read_text()
    table = text.split("## Which models")[1].split("\n## ")[0]
    named = {name for name in IMAGE_FAMILIES if f"`{name}`" in table}
    assert named == IMAGE_FAMILIES.keys() - {"pixtral"}, "which calls itself llava"
