"""The families whose images are served: what the router has of each, and what the shard has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shard.media.phi4_models import FAMILY as PHI4
from tests.shard.media.pictures import FAMILIES
from tests.system.test_omni import FAMILIES as OMNI
from tgi_trio.errors import ModelLoadError
from tgi_trio.media.processors import PROCESSORS
from tgi_trio.model.image_families import IMAGE_FAMILIES, find_family
from tgi_trio.router.media.layouts.table import LAYOUTS


def test_router_and_shard_have_the_same_families() -> None:
    rows = IMAGE_FAMILIES.values()
    assert {row.layout for row in rows} == LAYOUTS.keys()
    assert {row.processor for row in rows} == PROCESSORS.keys()
    held = {*FAMILIES, *(f"{kind}_thinker" for kind in OMNI), PHI4}
    assert held == IMAGE_FAMILIES.keys(), "each is held to transformers' whole model"


def test_pixtral_is_known_by_its_tower() -> None:
    pixtral = {"model_type": "llava", "vision_config": {"model_type": "pixtral"}}
    assert find_family(pixtral) is IMAGE_FAMILIES["pixtral"]
    assert find_family({"model_type": "llava"}) is IMAGE_FAMILIES["llava"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("florence2", "has no vision tower here"),
        ("fuyu", "has one image in a prompt"),
        ("molmo2", "pools its patches by a table"),
    ],
)
def test_others_are_refused_by_name(kind: str, why: str) -> None:
    with pytest.raises(
        ModelLoadError, match=f"'{kind}' {why}.*; served are images of aya_vision, "
    ):
        find_family({"model_type": kind})


def test_the_documents_list_them_all() -> None:
    text = (Path(__file__).parents[2] / "docs" / "media.md").read_text()
    table = text.split("## Which models")[1].split("\n## ")[0]
    named = {name for name in IMAGE_FAMILIES if f"`{name}`" in table}
    assert named == IMAGE_FAMILIES.keys() - {"pixtral"}, "which calls itself llava"
