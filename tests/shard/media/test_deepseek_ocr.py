"""DeepSeek-OCR as it is published: tokens and logits of transformers' class with its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.media.deepseek_ocr_models import ARCHITECTURES, QWEN2, make_deepseek_ocr
from tests.shard.media.images_support import Golden, Model
from tests.shard.media.pictures import IMAGE_TOKEN, PROCESSOR
from tests.shard.media.test_families import check
from tests.shard.torch_backend.models_support import load
from tgi_trio.errors import ModelLoadError
from tgi_trio.model import deepseek_ocr
from tgi_trio.model.config import read_config
from tgi_trio.model.image_rules import image_rules
from tgi_trio.shard.media.tower import TorchTower, load_tower

pytestmark = pytest.mark.usefixtures("one_thread")


def load_own_tower(folder: Path) -> TorchTower:
    kind = read_config(folder).model_type
    return load_tower(folder, kind, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_tokens_and_logits_are_those_of_transformers(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normalised by its code's numbers, which no file says."""
    monkeypatch.setitem(PROCESSOR, "image_mean", [0.5, 0.5, 0.5])
    monkeypatch.setitem(PROCESSOR, "image_std", [0.5, 0.5, 0.5])
    monkeypatch.setattr(deepseek_ocr, "_QWEN2", QWEN2)
    theirs, published = make_deepseek_ocr(tmp_path, family, image_token=IMAGE_TOKEN)
    config = read_config(published)
    assert (config.model_type, config.text_type) == (family, "deepseek")
    tower = load_own_tower(published)
    own = Model(family, published, Golden(theirs), tower, image_rules(config))
    runner, recorder = load(own.folder)
    assert runner.info.backend != "transformers"
    check(own, runner, recorder)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("sam_vit_b", {"layers": 10**8}, "layers 100000000 of a tower"),
        ("sam_vit_b", {"width": "16"}, "width '16' of a tower"),
        ("sam_vit_b", {"downsample_channels": [8]}, r"downsample_channels \[8\]: served are two"),
        ("clip-l-14-224", {"heads": None}, "heads None of a tower"),
    ],
)
def test_towers_that_config_json_describes_otherwise(
    tmp_path: Path, part: str, changes: dict[str, Any], message: str
) -> None:
    _, published = make_deepseek_ocr(tmp_path, "unlimited_ocr")
    values = json.loads((published / "config.json").read_text())
    values["vision_config"]["width"][part] |= changes
    (published / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=message):
        load_own_tower(published)
