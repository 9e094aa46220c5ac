"""Sounds of Ultravox: features and their number, what stands for them, what is not served."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.router.media.sound_files import as_floats, make_samples
from tests.shard.media.ultravox_models import TOWER, extractor
from tgi_trio.errors import ModelLoadError
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.media.sound import Sound
from tgi_trio.router.media.audio_model import AudioModel, find_audio_model
from tgi_trio.router.media.media_model import read_image_settings

CONFIG: dict[str, Any] = {
    **{"model_type": "ultravox", "hidden_size": 48, "stack_factor": 8},
    **{"audio_config": {"model_type": "whisper", **TOWER}, "audio_token_index": 512},
    "text_config": {"model_type": "llama", "vocab_size": 512, "hidden_size": 64},
}
AUDIO = {"added_tokens_decoder": {"512": {"content": "<|audio|>"}}}
END = {"eos_token": "</s>"}


def find(
    folder: Path, tokenizer: Any = None, processor: Any = None, own: Any = None, **config: Any
) -> AudioModel:
    files = {"config": CONFIG | config, "tokenizer_config": tokenizer or END}
    files |= {"processor_config": processor or {}, "preprocessor_config": own or {}}
    for name, said in files.items():
        (folder / f"{name}.json").write_text(json.dumps(said))
    return find_audio_model(folder, read_image_settings(folder))


def process(samples: Any) -> tuple[Any, list[int]]:
    """Return pieces of features and the frames of each, as fixie-ai's processor has them."""
    made = extractor()(
        [np.pad(samples, (0, max(0, 320 - len(samples))))], sampling_rate=16_000,
        padding="longest", pad_to_multiple_of=160, truncation=False, return_attention_mask=True,
        return_tensors="np",
    )  # fmt: skip
    features, length = made["input_features"][0], int(made["attention_mask"].sum())
    if length <= 3000:
        return features[None], [length]
    missing = -length % 3000
    filled = np.pad(features, ((0, 0), (0, missing)))
    pieces = np.split(filled, filled.shape[1] // 3000, axis=1)
    return np.stack(pieces), [min(3000, length - 3000 * i) for i in range(len(pieces))]


@pytest.mark.parametrize(
    "samples", [1, 200, 320, 321, 2560, 2561, 16_001, 480_000, 480_001, 482_400, 960_161]
)
def test_features_and_their_number_are_those_of_its_processor(tmp_path: Path, samples: int) -> None:
    heard = find(tmp_path)
    sound = as_floats(make_samples(samples / 16_000))
    found = FeatureExtractor(heard.extractor, heard.processor).extract(sound)
    features, frames = process(sound)
    assert np.array_equal(found["input_features"], features)
    assert found["input_features_mask"].sum(1).tolist() == frames
    assert found["input_features_mask"].shape == (len(frames), features.shape[-1])
    tokens = sum(math.ceil(each / 16) for each in frames)
    size = Sound(samples, 16_000)
    assert heard.layout.count_features(size) == tokens
    assert heard.layout.expand(size) == "</s>" * tokens


def test_features_stand_in_the_places_of_a_token_that_has_an_embedding(tmp_path: Path) -> None:
    """Its own token is behind the vocabulary of Llama, and within those of Qwen and Gemma."""
    both = AUDIO | END
    assert find(tmp_path, both).layout.feature_token == "</s>"
    text = CONFIG["text_config"] | {"vocab_size": 513}
    assert find(tmp_path, both, text_config=text).layout.feature_token == "<|audio|>"
    assert find(tmp_path, END, text_config=text).layout.feature_token == "</s>"
    with pytest.raises(ModelLoadError, match="its tokenizer has no EOS token"):
        find(tmp_path, AUDIO)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"audio_config": {"model_type": "wav2vec2"}}, "of the type 'wav2vec2'; served is 'wh"),
        ({"audio_latency_block_size": 100}, r"in blocks \(audio_latency_block_size 100\)"),
        ({"own": {"feature_size": 80}}, r"makes 80 numbers of a frame .*, and its tower reads 8"),
        ({"processor": {"encoder_ds_factor": 4}}, "says encoder_ds_factor 4; served is 2"),
        ({"processor": {"audio_context_size": 9}}, "says audio_context_size 9; served is 3000"),
        ({"stack_factor": 0}, "stack_factor, a positive number below .*, not 0"),
        ({"own": {"chunk_length": 20}}, "its feature extractor hears 20 s"),
    ],
)
def test_what_cannot_be_heard_is_told(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        find(tmp_path, **given)


def test_files_of_older_versions_are_read(tmp_path: Path) -> None:
    """They count samples of a row instead of frames, and bound no piece."""
    older = {"encoder_ds_factor": 320, "audio_context_size": None}
    assert find(tmp_path, processor=older).layout.feature_token == "</s>"
