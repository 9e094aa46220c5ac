"""Ultravox's tower and projector, of each version, against Whisper's encoder of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from tests.router.media.sound_files import as_floats, make_samples
from tests.shard.media.ultravox_models import TOWER, VERSIONS, make_ultravox
from tests.shard.torch_backend.interpreter import need_triton
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.resolve import resolve_model
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.shard.media.tower import load_tower

need_triton()

from tests.shard.media.audio_device import check_on_device  # noqa: E402  (it imports Triton)

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def extract(seconds: float) -> dict[str, np.ndarray]:
    own = {"feature_size": TOWER["num_mel_bins"]}
    return FeatureExtractor("ultravox", own).extract(as_floats(make_samples(seconds)))


@pytest.mark.parametrize("version", VERSIONS)
def test_features_are_those_of_its_parts(tmp_path: Path, version: str) -> None:
    """Of a row, of rows that fill no feature, and of pieces, the last of which is filled up."""
    made = make_ultravox(tmp_path, version, own_tower=version == "gelu")
    folder = resolve_model(str(made.folder))
    tower = load_tower(folder, "ultravox", CPU, torch.float32, hears=True)
    for seconds in (0.01, 0.02, 0.35, 0.71, 30.41):
        bundle = extract(seconds)
        rows = tower.encode(bundle).rows
        expected = made.hear(as_floats(make_samples(seconds))).numpy()
        assert rows.shape == expected.shape
        assert np.allclose(rows, expected, atol=1e-5 * np.abs(expected).max())
    check_on_device(folder, "ultravox", extract(0.71), tower.encode(extract(0.71)).rows)


def test_a_short_sound_is_heard_as_by_an_encoder_of_its_length(tmp_path: Path) -> None:
    """The oracle's own loop over layers is transformers' `forward`."""
    made = make_ultravox(tmp_path)
    samples = as_floats(make_samples(0.64))  # 64 frames: 32 rows, 4 features
    short = WhisperEncoder(WhisperConfig(**TOWER | {"max_source_positions": 32})).eval()
    weights = made.whisper.model.encoder.state_dict()
    weights["embed_positions.weight"] = weights["embed_positions.weight"][:32]
    short.load_state_dict(weights)
    with torch.no_grad():
        rows = short(torch.from_numpy(extract(0.64)["input_features"])).last_hidden_state
        expected = made.projector(rows.reshape(1, 4, -1), 4).numpy()
    tower = load_tower(resolve_model(str(made.folder)), "ultravox", CPU, torch.float32, hears=True)
    assert np.allclose(tower.encode(extract(0.64)).rows, expected, atol=1e-5)
    assert np.allclose(made.hear(samples).numpy(), expected, atol=1e-5)


def test_parts_that_do_not_fit_and_missing_weights_are_named(tmp_path: Path) -> None:
    made = make_ultravox(tmp_path, own_tower=True)
    file = made.folder / "model.safetensors"
    tensors = load_file(file)
    wide = torch.zeros(72, tensors["multi_modal_projector.linear_2.weight"].shape[1])
    save_file(tensors | {"multi_modal_projector.linear_2.weight": wide}, file)
    said = r"linear_2.weight' in .* has shape \[72, 24\], but config.json asks for \[64, 24\]"
    with pytest.raises(ModelLoadError, match=said):
        load_tower(resolve_model(str(made.folder)), "ultravox", CPU, torch.float32, hears=True)
    del tensors["audio_tower.conv2.bias"]
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=r"no tensor 'audio_tower\.conv2\.bias'"):
        load_tower(resolve_model(str(made.folder)), "ultravox", CPU, torch.float32, hears=True)
    config = made.folder / "config.json"
    config.write_text('{"model_type": "ultravox"}')
    with pytest.raises(ModelLoadError, match="does not say what its text and its tower are"):
        load_tower(made.folder, "ultravox", CPU, torch.float32, hears=True)
