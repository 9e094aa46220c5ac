"""InternVL as it is published: tokens and logits of transformers' class with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.media.images_support import Golden, Model
from tests.shard.media.internvl_models import make_internvl
from tests.shard.media.pictures import IMAGE_TOKEN, PROCESSOR
from tests.shard.media.test_families import check
from tests.shard.torch_backend.models_support import load
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import read_config
from tgi_trio.model.image_rules import image_rules
from tgi_trio.shard.media.tower import load_tower

pytestmark = pytest.mark.usefixtures("one_thread")


def make(folder: Path, **options: Any) -> Model:
    theirs, published = make_internvl(folder, **options)
    config = read_config(published)
    tower = load_tower(published, config.model_type, torch.device("cpu"), torch.float32)
    return Model("internvl", published, Golden(theirs), tower, image_rules(config))


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 16, "large": True},
        {"model_type": "llama", "whole": {"vision_feature_layer": -2}},
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2},
    ],
    ids=lambda options: options["model_type"],
)
def test_tokens_and_logits_are_those_of_transformers(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normalised by ImageNet's numbers, whatever a folder's other files say."""
    monkeypatch.setitem(PROCESSOR, "image_mean", [0.485, 0.456, 0.406])
    monkeypatch.setitem(PROCESSOR, "image_std", [0.229, 0.224, 0.225])
    whole = {"image_token_id": IMAGE_TOKEN} | options.pop("whole", {})
    own = make(tmp_path, whole=whole, **options)
    runner, recorder = load(own.folder)
    assert runner.info.backend != "transformers"
    check(own, runner, recorder)


def test_a_tower_without_its_tensors_is_named(tmp_path: Path) -> None:
    _, published = make_internvl(tmp_path)
    tensors = load_file(published / "model.safetensors")
    del tensors["vision_model.encoder.layers.1.attn.qkv.weight"]
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"no tensor 'vision_tower\.encoder\.layer\.1\.att"):
        load_tower(published, "internvl", torch.device("cpu"), torch.float32)
