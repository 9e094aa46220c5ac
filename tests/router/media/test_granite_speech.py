"""Sounds of Granite Speech: features, tokens, its own adapter, and what is not served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.router.media.sound_files import as_floats, make_samples
from tests.router.media.torchaudio_processors import make_granite_extractor
from tests.shard.media.granite_models import make_granite
from tgi_trio.errors import ModelLoadError
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.media.sound import Sound
from tgi_trio.router.media.audio_model import AudioModel, find_audio_model
from tgi_trio.router.media.media_model import read_image_settings
from tgi_trio.router.media.served_images import find_served_images

# The first frame of 0.1 s, with 8 mels, as torchaudio 2.11 and transformers 5.24 make it.
WITH_TORCHAUDIO = [
    *(1.30493, 1.41885, 1.68617, 1.81932, 1.43188, 1.22511, 1.24387, 1.25064),
    *(1.01900, 1.14837, 1.67342, 1.83050, 1.20831, 1.20450, 1.24404, 1.26735),
]
LENGTHS = (257, 319, 320, 479, 480, 4799, 4800, 5119, 5120, 16_001, 700_001)


def test_features_are_those_of_torchaudio() -> None:
    found = FeatureExtractor("granite_speech", {"n_mels": 8}).extract(as_floats(make_samples(0.1)))
    assert np.allclose(found["input_features"][0, 0], WITH_TORCHAUDIO, atol=1e-5)


@pytest.mark.parametrize(
    "own",
    [{}, {"n_mels": 8}, {"n_fft": 400, "win_length": 320, "hop_length": 200, "n_mels": 8}],
)
def test_features_and_their_number_are_those_of_transformers(
    tmp_path: Path, own: dict[str, int]
) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "granite_speech", "encoder_config": {"a": 1}}'
    )
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    heard = find_audio_model(tmp_path, read_image_settings(tmp_path))
    ours = FeatureExtractor(heard.extractor, heard.processor)
    theirs = make_granite_extractor(**own)
    for length in LENGTHS:
        samples = as_floats(make_samples(length / 16_000))
        found, expected = ours.extract(samples), theirs([samples])
        features = expected["input_features"].numpy()
        assert found["input_features"].shape == features.shape
        assert np.allclose(found["input_features"], features, atol=2e-5)
        assert found["input_features_mask"].shape == features.shape[:2]
        (count,) = expected["audio_embed_sizes"]
        assert heard.layout.count_features(Sound(length, 16_000)) == count
        assert heard.layout.expand(Sound(length, 16_000)) == "<|audio|>" * count
    short = own.get("n_fft", 512) // 2
    with pytest.raises(ValueError, match=f"it is too short for this model: {short} samples"):
        ours.extract(np.zeros(short, np.float32))


def test_settings_of_transformers_5_are_found_and_its_adapter(tmp_path: Path) -> None:
    folder = make_granite(tmp_path).folder
    (folder / "preprocessor_config.json").unlink()
    told = {"audio_processor": {"n_mels": 8, "hop_length": 80}, "audio_token": "<|audio|>"}
    (folder / "processor_config.json").write_text(json.dumps(told))
    model, why = find_served_images(folder)
    assert why is None and model is not None and model.layout is None
    heard = model.others["audio"]
    assert isinstance(heard, AudioModel) and heard.processor["n_mels"] == 8
    assert heard.layout.count_features(Sound(4800, 16_000)) == 6
    assert model.adapters == {"audio": folder}


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"n_fft": 256}, "has win_length 400, which is more than n_fft 256"),
        ({"n_mels": 0}, "need positive whole numbers: n_mels"),
        ({"win_length": "400"}, "need positive whole numbers: win_length"),
    ],
)
def test_an_extractor_whose_settings_make_no_sense_is_named(own: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        FeatureExtractor("granite_speech", own)


def test_what_hears_otherwise_and_what_lacks_its_adapter_is_not_served(tmp_path: Path) -> None:
    """Its text is; and so are sounds where config.json says that there is no adapter."""
    folder = make_granite(tmp_path).folder

    def refused() -> str:
        model, why = find_served_images(folder)
        assert model is None and why is not None
        return why

    settings = folder / "preprocessor_config.json"
    settings.write_text(json.dumps({"projector_downsample_rate": 3}))
    assert "projector_downsample_rate of 3, and config.json says window_size 15" in refused()
    settings.write_text("{}")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert "adapter_model.safetensors cannot be read as safetensors" in refused()
    (folder / "adapter_config.json").unlink()
    assert "the model's own adapter for them is missing: " in refused()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"has_lora_adapter": False}))
    model, why = find_served_images(folder)
    assert why is None and model is not None and not model.adapters
