"""Sounds: samples, features and numbers of tokens are those of transformers."""

from __future__ import annotations

import importlib
import io
import json
import struct
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.router.media.sound_files import as_floats, encode_sound, make_samples, make_sound
from tests.router.media.video_files import make_video
from tgi_trio.errors import ModelLoadError
from tgi_trio.media.feature_extractors import EXTRACTORS, FeatureExtractor
from tgi_trio.media.sound import Sound
from tgi_trio.media.sounds import SoundLimits, read_sound
from tgi_trio.router.media.audio_model import find_audio_model
from tgi_trio.router.media.layouts.audio import AUDIO_LAYOUTS
from tgi_trio.router.media.layouts.layout import ImageSettings

LIMITS = SoundLimits(10.0)
PROCESSORS = {
    "gemma3n": "Gemma3nProcessor",
    "gemma4": "Gemma4Processor",
    "gemma4_unified": "Gemma4UnifiedProcessor",
}
# Where frames begin and end, in samples.
LENGTHS = [320, 321, 640, 641, 1119, 1120, 1121, 1280, 4999, 16_000, 16_001, 47_123]


def theirs(family: str) -> Any:
    module, name, *_ = EXTRACTORS[family]
    path = f"transformers.models.{module}.feature_extraction_{module}"
    return getattr(importlib.import_module(path), name)()


@pytest.mark.parametrize("family", sorted(PROCESSORS))
def test_features_and_their_number_are_those_of_transformers(family: str) -> None:
    processors = importlib.import_module(f"transformers.models.{family}.processing_{family}")
    processor = getattr(processors, PROCESSORS[family])
    layout = AUDIO_LAYOUTS[family]({}, ImageSettings({}), {})
    begin, audio, end = "<start_of_audio>", "<audio_soft_token>", "<end_of_audio>"
    if family != "gemma3n":
        begin, audio, end = "<|audio>", "<|audio|>", "<audio|>"
    fixed = f"\n\n{begin}{audio * 188}{end}\n\n"
    told = SimpleNamespace(
        audio_token=audio, boa_token=begin, eoa_token=end, full_audio_sequence=fixed
    )
    ours = FeatureExtractor(family, {})
    for length in LENGTHS:
        samples = as_floats(make_samples(length / 16_000))
        assert len(samples) == length
        expected = theirs(family)([samples], return_tensors="np")
        if not np.any(expected["input_features_mask"]):
            with pytest.raises(ValueError, match=f"it is too short for this model: {length}"):
                ours.extract(samples)
            continue
        found = ours.extract(samples)
        assert np.array_equal(found["input_features"], expected["input_features"])
        assert np.array_equal(found["input_features_mask"], expected["input_features_mask"])
        text = processor.replace_audio_token(told, expected, 0)
        sound = Sound(length, 16_000)
        assert layout.expand(sound) == text, length
        marks = sum(map(text.count, layout.mark_tokens))
        assert layout.count_features(sound) == text.count(audio) + marks


@pytest.mark.parametrize(
    ("kind", "codec", "exact"),
    [
        *[("wav", "pcm_s16le", True), ("aiff", "pcm_s16be", True), ("flac", "flac", True)],
        *[("mp3", "libmp3lame", False), ("ogg", "libopus", False), ("mp4", "aac", False)],
        ("webm", "libopus", False),
    ],
)
def test_files_of_all_kinds_are_heard(kind: str, codec: str, exact: bool) -> None:
    samples = make_samples(0.5, 48_000)
    data = encode_sound(samples, 48_000, kind, codec)
    found = read_sound(data, 48_000, LIMITS)
    expected = as_floats(samples)
    assert found.dtype == np.float32 and abs(len(found) - len(expected)) <= 4096
    count = min(len(found), len(expected))
    if not exact:  # what is lost on the way, and where encoders begin before the sound
        ours, true = (np.abs(np.fft.rfft(each[:count])) for each in (found, expected))
        assert ours @ true > 0.9 * np.linalg.norm(ours) * np.linalg.norm(true)
    else:
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("channels", [6, 8, 12])
def test_any_number_of_channels_is_averaged(channels: int) -> None:
    samples = make_samples(0.2, channels=channels)
    memory = io.BytesIO()
    with wave.open(memory, "wb") as file:
        file.setparams((channels, 2, 16_000, 0, "NONE", ""))
        file.writeframes(samples.T.tobytes())
    found = read_sound(memory.getvalue(), 16_000, LIMITS)
    assert np.allclose(found, as_floats(samples), atol=1e-7)


def test_channels_are_averaged_and_rates_changed() -> None:
    stereo = make_samples(0.5, 44_100, channels=2)
    found = read_sound(encode_sound(stereo, 44_100), 44_100, LIMITS)
    assert np.allclose(found, as_floats(stereo), atol=1e-7)
    found = read_sound(encode_sound(stereo, 44_100), 16_000, LIMITS)
    assert abs(len(found) - 8000) <= 1
    # The tones are where they were: both are far below half the new rate.
    pitches = [
        np.abs(np.fft.rfft(each)).argmax() / len(each) * rate
        for each, rate in ((found, 16_000), (as_floats(stereo), 44_100))
    ]
    assert abs(pitches[0] - pitches[1]) < 3


@pytest.mark.parametrize(
    ("data", "limits", "said"),
    [
        (b"", LIMITS, "it is none of WAV, MP3"),
        (b"RIFF" * 20, LIMITS, "it is none of WAV, MP3"),
        (b"#EXTM3U\nfile:///etc/passwd\n", LIMITS, "it is none of WAV, MP3"),
        (make_video(frames=2), LIMITS, "it has no sound"),
        (make_sound(2), SoundLimits(1.5), r"more than 1.5 s, .* \(--max-audio-seconds\)"),
        (make_sound(2), SoundLimits(9, 16_000), "more than 1 s, which this model hears at most"),
        (make_sound(1)[:78], LIMITS, "it has no samples"),
        (
            make_sound(1).replace(b"fmt \x10\0\0\0\1\0", b"fmt \x10\0\0\0ww"),
            LIMITS,
            "its codec is not known",
        ),
    ],
)
def test_what_is_no_sound_or_too_long_is_refused(data: bytes, limits: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_sound(data, 16_000, limits)


def test_notes_in_another_encoding_do_not_matter() -> None:
    note = b"INAM" + struct.pack("<I", 4) + "Fü\xdf".encode("latin-1") + b"\0"
    chunk = b"LIST" + struct.pack("<I", 4 + len(note)) + b"INFO" + note
    plain = make_sound(0.5)
    length = struct.pack("<I", len(plain) - 8 + len(chunk))
    begin = plain.index(b"LIST") if b"LIST" in plain else plain.index(b"data")
    noted = plain[:4] + length + plain[8:begin] + chunk + plain[begin:]
    found = read_sound(noted, 16_000, LIMITS)
    assert np.array_equal(found, as_floats(make_samples(0.5)))


def test_what_an_encoder_adds_at_the_end_is_left_out() -> None:
    found = read_sound(make_sound(1.05), 16_000, SoundLimits(9, 16_000))
    assert np.array_equal(found, as_floats(make_samples(1.05))[:16_000])


def test_settings_of_a_folder_are_read_and_those_that_make_no_sense_named(tmp_path: Path) -> None:
    config = {"model_type": "gemma4", "audio_config": {"hidden_size": 16}}
    own = {"sampling_rate": 8_000, "frame_length_ms": 20.0}
    marks = {"eoa_token": {"content": "<a|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(marks))
    settings = ImageSettings(config, {}, {"feature_extractor": own})
    model = find_audio_model(tmp_path, settings)
    assert model.sampling_rate == 8_000 and model.layout.expand(Sound(8_000, 8_000)).endswith(
        "<|audio|><a|>"
    )
    assert json.loads(model.describe_longest(600)) == {
        **{"family": "gemma4", "settings": own, "samples": 480_000}
    }
    wrong: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"model_type": "qwen3_vl"}, own, "served is audio of gemma3n, gemma4, gemma4_unified"),
        ({"model_type": "gemma4"}, own, "has no audio_config"),
        (config, {"dither": 0.1}, r"adds noise \(dither\)"),
        (config, {"hop_length_ms": 0}, "need positive numbers: frame_length_ms, hop_length_ms"),
    ]
    for given, its, said in wrong:
        with pytest.raises(ModelLoadError, match=said):
            find_audio_model(tmp_path, ImageSettings(given, {}, {"feature_extractor": its}))
    settings = ImageSettings(config | {"model_type": "gemma3n"}, {}, {"audio_seq_length": 9})
    with pytest.raises(ModelLoadError, match="audio_soft_tokens_per_image 188"):
        find_audio_model(tmp_path, settings)
