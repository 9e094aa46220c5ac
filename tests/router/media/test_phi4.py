"""Sounds of Phi-4-multimodal: features, tokens, its own adapters, and what is not served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.router.media.sound_files import as_floats, make_samples
from tests.shard.media.phi4_models import make_phi4
from tgi_trio.errors import ModelLoadError
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.media.sound import Sound
from tgi_trio.router.media.audio_model import find_audio_model
from tgi_trio.router.media.layouts.layout import ImageSettings
from tgi_trio.router.media.layouts.phi4 import lay_out_phi4
from tgi_trio.router.media.media_model import read_image_settings
from tgi_trio.router.media.served_images import find_served_images

CONFIG = {"model_type": "phi4_multimodal", "audio_config": {"num_blocks": 1}}
LENGTHS = (400, 559, 560, 1679, 1680, 1681, 16_000, 700_001)


def write(folder: Path, own: dict[str, Any], **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "preprocessor_config.json").write_text(json.dumps(own))


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"feature_size": 8, "win_length": 320, "n_fft": 400, "hop_length": 80},
        {"preemphasis": 0.5, "mel_min_frequency": 20, "mel_max_frequency": 4000.0},
    ],
)
def test_features_and_their_number_are_those_of_transformers(
    tmp_path: Path, own: dict[str, Any]
) -> None:
    from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import (
        Phi4MultimodalFeatureExtractor,
    )

    write(tmp_path, own, audio_config={"input_size": own.get("feature_size", 80)})
    heard = find_audio_model(tmp_path, read_image_settings(tmp_path))
    ours = FeatureExtractor(heard.extractor, heard.processor)
    theirs = Phi4MultimodalFeatureExtractor(**own)
    for length in LENGTHS:
        samples = as_floats(make_samples(length / 16_000))
        expected = theirs([samples], sampling_rate=16_000)
        found, features = ours.extract(samples), expected["audio_input_features"].numpy()
        assert found.keys() == {"input_features", "input_features_mask"}
        assert found["input_features"].shape == features.shape
        assert np.allclose(found["input_features"], features, atol=1e-4)
        (count,) = expected["audio_embed_sizes"].tolist()
        assert heard.layout.count_features(Sound(length, 16_000)) == count
        assert heard.layout.expand(Sound(length, 16_000)) == "<|audio|>" * count
    short = own.get("win_length", 400) - 1
    with pytest.raises(ValueError, match=f"it is too short for this model: {short} samples"):
        ours.extract(np.zeros(short, np.float32))
    assert ours.extract(samples, beside=True)["beside_images"].tolist() == [1]


@pytest.mark.parametrize(
    ("own", "tower", "said"),
    [
        ({"audio_compression_rate": 4}, {}, "audio_compression_rate 4, and config.json time_red"),
        ({}, {"input_size": 40}, "feature_size 80, and config.json input_size 40: both have"),
        ({"audio_feat_stride": 2}, {}, "audio_feat_stride 2; served is 1"),
    ],
)
def test_what_hears_otherwise_is_not_served(
    tmp_path: Path, own: dict[str, Any], tower: dict[str, Any], said: str
) -> None:
    write(tmp_path, own, audio_config={"num_blocks": 1} | tower)
    with pytest.raises(ModelLoadError) as caught:
        find_audio_model(tmp_path, read_image_settings(tmp_path))
    assert said in str(caught.value)


@pytest.mark.parametrize("own", [{"preemphasis": "much"}, {"mel_max_frequency": -1}])
def test_an_extractor_whose_settings_make_no_sense_is_named(own: dict[str, Any]) -> None:
    (name,) = own
    with pytest.raises(ModelLoadError, match=f"need {name}, a number from 0 on, not "):
        FeatureExtractor("phi4", own)


def test_a_tower_of_another_size_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="vision_config says crop_size 336; served is 448"):
        lay_out_phi4(ImageSettings({"vision_config": {"crop_size": 336}}))


def test_what_lacks_its_adapter_is_not_served(tmp_path: Path) -> None:
    """Sounds alone, where theirs is missing; nothing, where that for images is."""
    folder = make_phi4(tmp_path).folder
    model, why = find_served_images(folder)
    assert why is None and model is not None
    assert model.adapters == {
        "image": folder / "vision-lora",
        "audio": folder / "speech-lora",
    }
    (folder / "speech-lora" / "adapter_config.json").unlink()
    model, why = find_served_images(folder)
    assert why is None and model is not None and model.lacking == ("audio",)
    assert "the model's own adapter for them is missing: " in model.unserved["audio"]
    assert list(model.adapters) == ["image"] and not model.others
    (folder / "vision-lora" / "adapter_model.safetensors").unlink()
    model, why = find_served_images(folder)
    assert model is None and why is not None and "holds adapter_config.json but no" in why
