"""Sounds for Whisper's encoder (Qwen2-Audio): features, tokens, and what is not served."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.router.images.sound_files import as_floats, make_samples
from tgi_trio.images.feature_extractors import FeatureExtractor
from tgi_trio.images.sound import Sound
from tgi_trio.router.images import audio_model
from tgi_trio.router.images.served_images import decide_images, find_served_images

TEXT = {"model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 1}
CONFIG = {"model_type": "qwen2_audio", "text_config": TEXT, "audio_config": {"d_model": 16}}
OWN = {"feature_size": 8}


def write(folder: Path, own: dict[str, Any] = OWN, config: dict[str, Any] = CONFIG) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(own))


def test_features_and_their_number_are_those_of_transformers(tmp_path: Path) -> None:
    """Bit for bit as where torch is not installed, and as near as rounding with it."""
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor
    from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

    write(tmp_path)
    model, _ = find_served_images(tmp_path)
    assert model is not None and model.layout is None
    layout = model.others["audio"].layout
    assert layout.around == ("<|audio_bos|>", "<|audio_eos|>")
    told: Any = SimpleNamespace(audio_token="<|AUDIO|>", feature_extractor=None)
    ours = FeatureExtractor("whisper", OWN)
    given: Any = {"sampling_rate": 16_000, "return_attention_mask": True, "return_tensors": "np"}
    for length in (321, 640, 641, 16_001, 480_000):
        samples = as_floats(make_samples(length / 16_000))
        with_torch: Any = WhisperFeatureExtractor(**OWN)
        plain: Any = WhisperFeatureExtractor(**OWN)
        plain._torch_extract_fbank_features = plain._np_extract_fbank_features
        found, expected = ours.extract(samples), plain([samples], **given)
        assert np.array_equal(found["input_features"], expected["input_features"])
        assert np.array_equal(found["input_features_mask"], expected["attention_mask"] == 1)
        near = with_torch([samples], **given)["input_features"]
        assert np.allclose(found["input_features"], near, atol=1e-4)
        frames = int(expected["attention_mask"].sum())
        count = (((frames - 1) // 2 + 1) - 2) // 2 + 1
        text = Qwen2AudioProcessor.replace_audio_token(told, {"num_audio_tokens": [count]}, 0)
        assert layout.expand(Sound(length, 16_000)) == text
        assert layout.count_features(Sound(length, 16_000)) == count > 0
    with pytest.raises(ValueError, match="it is too short for this model: 320 samples"):
        ours.extract(np.zeros(320, np.float32))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"chunk_length": 20}, "hears 20 s of 16000 samples in a second; served are 30 s of 16000"),
        ({"sampling_rate": 8_000}, "hears 30 s of 8000 samples"),
        ({"hop_length": 320}, "makes 1500 frames (hop_length 320), and its tower reads 3000"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    tmp_path: Path, own: dict[str, Any], said: str
) -> None:
    write(tmp_path, OWN | own)
    model, why = find_served_images(tmp_path)
    assert model is None and why is not None
    assert said in why


def test_without_pyav_its_text_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is Pillow needed, where there is nothing to see."""
    write(tmp_path)
    settings: Any = SimpleNamespace(
        model_path=tmp_path, ranks_elsewhere=0, num_shard=1, pipeline_stages=1
    )
    monkeypatch.setattr(audio_model, "find_spec", {"av": True}.get)
    model, unserved = decide_images(settings)
    assert model is not None and not unserved
    monkeypatch.setattr(audio_model, "find_spec", {}.get)
    model, unserved = decide_images(settings)
    assert model is None and set(unserved) == {"audio"}
    assert "it needs PyAV, pip install 'tgi-trio[audio]'" in unserved["audio"]
    assert "audio parts are not served: it needs PyAV" in caplog.text
    monkeypatch.undo()
    settings.pipeline_stages = 2
    model, unserved = decide_images(settings)
    assert model is None and list(unserved) == ["audio"] and "stages" in unserved["audio"]
