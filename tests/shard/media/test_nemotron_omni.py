"""Nemotron 3 Nano Omni as NVIDIA publishes it: tokens and logits of transformers' class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.media.images_support import Golden, Model, make_folder
from tests.shard.media.pictures import IMAGE_TOKEN, PROCESSOR
from tests.shard.media.test_families import check
from tests.shard.torch_backend.models_support import load
from tgi_trio.errors import ModelLoadError
from tgi_trio.media.nemotron import NemotronCanvas
from tgi_trio.model.check import check_checkpoint, model_spec
from tgi_trio.model.config import read_config
from tgi_trio.model.image_families import IMAGE_FAMILIES
from tgi_trio.model.image_rules import image_rules
from tgi_trio.model.nemotron_omni import name_as_transformers
from tgi_trio.shard.media.normalising import Normalising
from tgi_trio.shard.media.tower import load_tower

FAMILY = "nemotron_h_omni"


def publish(folder: Path) -> Path:
    """Rewrite a folder of transformers' as the published one is: older names of its settings, parts
    that hear, and no factors of 1.
    """
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    values["llm_config"] = values.pop("text_config")
    values["vit_hidden_size"] = values.pop("vision_hidden_size")
    values["img_context_token_id"] = values.pop("image_token_id")
    values["sound_config"] = {
        **{"model_type": "parakeet", "hidden_size": 16, "projection_hidden_size": 16},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        **{"num_mel_bins": 16, "projection_bias": False},
    }
    (folder / "config.json").write_text(json.dumps(values))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: each for name, each in tensors.items() if "layer_scale" not in name}
    for name in ("sound_encoder.encoder.layers.0.a.weight", "sound_projection.norm.weight"):
        tensors[name] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    renamed = {name.replace("image_", "norm_"): each for name, each in PROCESSOR.items()}
    (folder / "preprocessor_config.json").write_text(json.dumps(renamed))
    return folder


@pytest.mark.usefixtures("one_thread")
def test_tokens_and_logits_are_those_of_transformers(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, FAMILY)
    tensors = load_file(folder / "model.safetensors")
    factors = {name: torch.ones_like(t) for name, t in tensors.items() if "layer_scale" in name}
    assert factors
    save_file(tensors | factors, folder / "model.safetensors", {"format": "pt"})
    golden = Golden(folder)
    config = read_config(publish(folder))
    check_checkpoint(config, model_spec(config))
    tower = load_tower(folder, config.model_type, torch.device("cpu"), torch.float32)
    own = Model(FAMILY, folder, golden, tower, image_rules(config))
    runner, recorder = load(folder)
    assert runner.info.backend != "transformers"
    check(own, runner, recorder)


def test_of_two_names_transformers_own_counts() -> None:
    both = {"model_type": FAMILY, "img_context_token_id": 7, "image_token_id": IMAGE_TOKEN}
    assert name_as_transformers(both) == {"model_type": FAMILY, "image_token_id": IMAGE_TOKEN}
    other = {"model_type": "llama", "llm_config": {}}
    assert name_as_transformers(other) == other


@pytest.mark.parametrize("own", [{}, {"image_mean": [0.1, 0.2, 0.3]}])
def test_older_names_of_mean_and_deviation_count_where_the_newer_are_not_there(
    tmp_path: Path, own: dict[str, Any]
) -> None:
    said = {"norm_mean": [0.5, 0.6, 0.7], "norm_std": [0.5, 0.5, 0.5], **own}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    found = Normalising.read(tmp_path, IMAGE_FAMILIES[FAMILY]).table
    mean = np.array(own.get("image_mean", said["norm_mean"]))
    np.testing.assert_allclose(found[:, 0], -mean / 0.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"downsample_ratio": 0}, "downsample_ratio must be more than 0"),
        ({"max_num_patches": 0}, "max_num_patches must be a positive number"),
        ({"max_model_len": 2048}, "a size that depends on how many there are"),
    ],
)
def test_what_would_be_another_size_is_refused(said: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelLoadError, match=why):
        NemotronCanvas.read(said)
