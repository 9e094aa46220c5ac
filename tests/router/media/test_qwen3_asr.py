"""Sounds of Qwen3-ASR: features, tokens, languages, and the text in what it answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.router.media.sound_files import as_floats, make_samples
from tests.shard.media.qwen3_asr_models import EXTRACTOR
from tgi_trio.errors import ModelLoadError
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.media.sound import Sound
from tgi_trio.model.config import read_config
from tgi_trio.router.media.audio_model import AudioModel, find_audio_model
from tgi_trio.router.media.layouts.qwen3_asr import LANGUAGES, read_transcript
from tgi_trio.router.media.media_model import read_image_settings

TEXT = {"hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 1}
TOWER = {"num_mel_bins": 16, "n_window": 50}


def find(folder: Path, own: dict[str, Any] = EXTRACTOR, **config: Any) -> AudioModel:
    whole = {"model_type": "qwen3_asr", "text_config": TEXT, "audio_config": TOWER} | config
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    return find_audio_model(folder, read_image_settings(folder))


def test_features_and_their_number_are_those_of_transformers(tmp_path: Path) -> None:
    """Also of what is filled up to half a second, and next to the ends of seconds."""
    from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
    from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

    heard = find(tmp_path)
    ours = FeatureExtractor(heard.extractor, heard.processor)
    kind: Any = Qwen3ASRProcessor
    processor, extractor = kind.__new__(kind), Qwen3ASRFeatureExtractor(**EXTRACTOR)
    processor.feature_extractor, processor.audio_token = extractor, "<|audio_pad|>"
    for length in (1, 160, 7_999, 8_000, 8_161, 15_999, 16_000, 16_160, 17_281, 481_279):
        samples = as_floats(make_samples(length / 16_000))[:length]
        found = ours.extract(samples)
        expected, (text,) = processor._process_audio([samples], **kind.audio_kwargs)
        mask = np.asarray(expected["input_features_mask"]) == 1
        assert found["input_features_mask"].all()
        count = found["input_features_mask"].shape[1]
        assert mask.sum() == count
        features = np.asarray(expected["input_features"])[..., :count]
        assert found["input_features"].shape == features.shape
        assert np.allclose(found["input_features"], features, atol=1e-4)
        assert heard.layout.expand(Sound(length, 16_000)) == text
    assert heard.layout.around == ("<|audio_start|>", "<|audio_end|>")


@pytest.mark.parametrize(
    ("own", "config", "said"),
    [
        ({"hop_length": 80}, {}, "hop_length 80; served is 160, of all such models"),
        ({"min_length": 0}, {}, "min_length 0; served is 8000"),
        ({}, {"audio_config": TOWER | {"n_window": 100}}, "n_window 100; served is 50"),
    ],
)
def test_what_hears_otherwise_is_not_served(
    tmp_path: Path, own: dict[str, Any], config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelLoadError, match=said):
        find(tmp_path, EXTRACTOR | own, **config)


def test_languages_are_those_of_transformers() -> None:
    from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME

    assert dict(LANGUAGES) == LANGUAGE_CODE_TO_NAME


REPEATED = st.builds(
    lambda before, part, times, behind: before + part * times + behind,
    st.text("ab <>\n", max_size=30),
    st.text("abc\n", min_size=1, max_size=22),
    st.integers(17, 43),
    st.text("ab ", max_size=45),
)


@given(
    st.one_of(st.text("a <>\n", max_size=99), REPEATED, st.tuples(REPEATED, REPEATED).map("".join)),
    st.sampled_from(["", "language English<asr_text>", "language None<asr_text>", "x\n<asr_text>"]),
)
@example("a" * 20 + "b" * 20, "")
@example("a" * 20 + "b" * 19, "")
@example("ab" * 20, "language Chinese<asr_text> ")
def test_transcripts_are_those_of_transformers(text: str, begin: str) -> None:
    from transformers.models.qwen3_asr.processing_qwen3_asr import _parse_single_output

    assert read_transcript(begin + text) == _parse_single_output(begin + text)["transcription"]


@pytest.mark.parametrize(
    "config",
    [
        {"thinker_config": {"text_config": TEXT, "audio_config": TOWER}},
        {
            "thinker_config": {
                "model_type": "qwen3_asr",
                "text_config": TEXT | {"model_type": "qwen3_asr_text"},
                "audio_config": TOWER,
            }
        },
        {"text_config": TEXT | {"model_type": "qwen3"}, "audio_config": TOWER},
    ],
)
def test_files_of_both_kinds_are_of_one_type(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_asr", **config}))
    found = read_config(tmp_path)
    assert (found.model_type, found.text_type, found.vocab_size) == ("qwen3_asr", "qwen3", 512)
