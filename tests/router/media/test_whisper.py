"""Sounds for Whisper's encoder: features, tokens, and what is not served."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.router.media.sound_files import as_floats, make_samples
from tests.shard.media.audio_models import make_processor
from tgi_trio.errors import ModelLoadError
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.media.sound import Sound
from tgi_trio.router.media import audio_model
from tgi_trio.router.media.audio_model import AudioModel, find_audio_model
from tgi_trio.router.media.media_model import read_image_settings
from tgi_trio.router.media.served_images import decide_images, find_served_images
from tgi_trio.testing.checkpoints import make_tokenizer

TEXT = {"model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 1}
CONFIG = {"model_type": "qwen2_audio", "text_config": TEXT, "audio_config": {"num_mel_bins": 8}}
GLM: dict[str, Any] = {"model_type": "glmasr", "text_config": TEXT | {"model_type": "llama"}}
VOXTRAL: dict[str, Any] = {
    "model_type": "voxtral",
    "text_config": TEXT | {"model_type": "llama", "num_attention_heads": 4},
    "audio_config": {"num_mel_bins": 8},
}
OWN = {"feature_size": 8}


def write(folder: Path, own: dict[str, Any] = OWN, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "preprocessor_config.json").write_text(json.dumps(own))


@pytest.mark.parametrize(
    ("family", "lengths", "short"),
    [
        ("qwen2_audio", (321, 641, 16_001, 480_000), 320),
        ("glmasr", (961, 1281, 480_000, 480_001, 487_777), 960),
    ],
)
def test_features_and_their_number_are_those_of_transformers(
    tmp_path: Path, family: str, lengths: tuple[int, ...], short: int
) -> None:
    """Bit for bit as where torch is not installed, and as near as rounding with it."""
    from transformers import PreTrainedTokenizerFast

    write(tmp_path, **(GLM if family == "glmasr" else {}))
    model, _ = find_served_images(tmp_path)
    assert model is not None and model.layout is None
    heard = model.others["audio"]
    assert isinstance(heard, AudioModel)
    layout, ours = heard.layout, FeatureExtractor(heard.extractor, heard.processor)
    assert ("<|audio_bos|>" in layout.around) == (family == "qwen2_audio")
    make_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    processor = make_processor(family, tokenizer)
    given: Any = {"sampling_rate": 16_000, "return_attention_mask": True, "return_tensors": "pt"}
    for length in lengths:
        samples = as_floats(make_samples(length / 16_000))
        found = ours.extract(samples)
        expected, (text,) = processor._process_audio([samples], **given)
        assert np.array_equal(found["input_features"], expected["input_features"])
        mask = expected.get("feature_attention_mask", expected.get("input_features_mask"))
        assert np.array_equal(found["input_features_mask"], mask == 1)
        assert layout.expand(Sound(length, 16_000)) == text
        assert layout.count_features(Sound(length, 16_000)) == text.count(layout.feature_token) > 0
    samples = samples[:480_000]
    with_torch = type(processor.feature_extractor)(**OWN)([samples], **given)["input_features"]
    assert np.allclose(ours.extract(samples)["input_features"], with_torch, atol=1e-4)
    with pytest.raises(ValueError, match=f"it is too short for this model: {short} samples"):
        ours.extract(np.zeros(short, np.float32))


def test_features_of_voxtral_and_their_number_are_those_of_transformers(tmp_path: Path) -> None:
    """Of the whole of a sound at once, cut into pieces: silence behind it is heard as well."""
    from transformers import PreTrainedTokenizerFast

    write(tmp_path, **VOXTRAL)
    model, _ = find_served_images(tmp_path)
    assert model is not None and model.layout is None
    heard = model.others["audio"]
    assert isinstance(heard, AudioModel)
    ours = FeatureExtractor(heard.extractor, heard.processor)
    make_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    processor = make_processor("voxtral", tokenizer)
    given = dict(processor.audio_kwargs)
    pieces = given.pop("max_source_positions")
    for length, count in ((160, 1), (16_001, 1), (480_000, 1), (480_001, 2)):
        samples = as_floats(make_samples(length / 16_000))
        found = ours.extract(samples)
        expected = processor._retrieve_input_features([samples], pieces, **given).numpy()
        assert np.array_equal(found["input_features"], expected)
        assert found["input_features_mask"].shape == (count, 3000)
        assert heard.layout.count_features(Sound(length, 16_000)) == 375 * count
    write(tmp_path, **VOXTRAL | {"audio_config": {"hidden_size": 16, "intermediate_size": 77}})
    assert "24000 numbers, no multiple of its intermediate_size 77" in str(
        find_served_images(tmp_path)
    )


OMNI: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "qwen2_5_omni": ({"chunk_length": 300}, (321, 641, 16_001, 480_001, 4_799_900, 4_800_000), 320),
    "qwen3_omni_moe": ({"chunk_length": 30}, (160, 319, 16_000, 17_281, 480_000, 481_279), 159),
}


@pytest.mark.parametrize("family", OMNI)
def test_features_of_omni_and_their_number_are_those_of_transformers(
    tmp_path: Path, family: str
) -> None:
    """Also next to the ends of pieces of a second, and of what silence is added to there."""
    from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

    chunk, lengths, short = OMNI[family]
    config = {"audio_config": {"n_window": 50}, "model_type": f"{family}_thinker"}
    write(tmp_path, OWN | chunk, **config)
    heard = find_audio_model(tmp_path, read_image_settings(tmp_path))
    layout, ours = heard.layout, FeatureExtractor(heard.extractor, heard.processor)
    module = importlib.import_module(f"transformers.models.{family}.processing_{family}")
    (kind,) = (getattr(module, name) for name in module.__all__ if name.endswith("Processor"))
    extractor: Any = WhisperFeatureExtractor(**OWN, **chunk)
    extractor._torch_extract_fbank_features = extractor._np_extract_fbank_features
    processor = kind.__new__(kind)
    processor.feature_extractor, processor.audio_token = extractor, layout.feature_token
    for length in lengths:
        samples = as_floats(make_samples(length / 16_000))
        found = ours.extract(samples)
        expected, (text,) = processor._process_audio([samples], **kind.audio_kwargs)
        mask = np.asarray(expected["feature_attention_mask"]) == 1
        assert found["input_features_mask"].all()
        heard_features = np.asarray(expected["input_features"])[..., : mask.sum()]
        assert np.array_equal(found["input_features"], heard_features)
        assert layout.expand(Sound(length, 16_000)) == text
        assert layout.count_features(Sound(length, 16_000)) == text.count(layout.feature_token) > 0
    with pytest.raises(ValueError, match=f"it is too short for this model: {short} samples"):
        ours.extract(np.zeros(short, np.float32))


@pytest.mark.parametrize(
    ("config", "own", "said"),
    [
        ({"model_type": "qwen2_5_omni_thinker"}, {}, "hears 30 s (chunk_length); served are 300"),
        (
            {"model_type": "qwen3_omni_moe_thinker", "audio_config": {"n_window": 100}},
            *({}, "n_window 100; served is 50"),
        ),
        ({"model_type": "qwen3_omni_moe_thinker"}, {"hop_length": 80}, "each 80 (hop_length)"),
    ],
)
def test_an_omni_that_hears_otherwise_is_not_served(
    tmp_path: Path, config: dict[str, Any], own: dict[str, Any], said: str
) -> None:
    write(tmp_path, OWN | own, **config)
    with pytest.raises(ModelLoadError) as caught:
        find_audio_model(tmp_path, read_image_settings(tmp_path))
    assert said in str(caught.value)


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


def test_a_glm_that_hears_less_is_not_served(tmp_path: Path) -> None:
    write(tmp_path, **GLM)
    (tmp_path / "processor_config.json").write_text(json.dumps({"max_audio_len": 60}))
    model, why = find_served_images(tmp_path)
    assert model is None and why is not None and "max_audio_len 60; served is 655" in why


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
