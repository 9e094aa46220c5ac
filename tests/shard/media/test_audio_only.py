"""The tower of a model that only hears: on a device as on a CPU, and where weights are missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.router.media.sound_files import as_floats, make_samples
from tests.shard.media.audio_models import EXTRACTOR, make_folder
from tests.shard.media.granite_models import EXTRACTOR as GRANITE
from tests.shard.media.granite_models import make_granite
from tests.shard.torch_backend.interpreter import need_triton
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.router.media.served_images import find_served_images
from tgi_trio.shard.media.largest import make_longest
from tgi_trio.shard.media.loading import load_encoder
from tgi_trio.shard.media.tower import load_tower
from tgi_trio.testing.checkpoints import VOCAB_SIZE

need_triton()

from tests.shard.media.audio_device import check_on_device  # noqa: E402  (it imports Triton)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", ["granite_speech", "granite_speech_plus"])
def test_features_of_granite_are_those_of_the_whole_model(tmp_path: Path, family: str) -> None:
    """Scaled as embeddings are; of whole blocks and of cut ones; on a device as well."""
    made = make_granite(tmp_path, family)
    model, seen = made.adapted.get_base_model(), list[Any]()
    model.model.language_model.layers[0].register_forward_pre_hook(
        lambda module, args: seen.append(args[0])
    )
    tower = load_tower(tmp_path, family, torch.device("cpu"), torch.float32, hears=True)
    for seconds in (0.02, 0.2, 0.4, 1.4):  # blocks have 20 frames, half a second
        bundle = FeatureExtractor("granite_speech", GRANITE).extract(
            as_floats(make_samples(seconds))
        )
        rows = tower.encode(bundle).rows
        ids = torch.tensor([[5, *[VOCAB_SIZE] * len(rows), 6]])
        with torch.no_grad():
            model(input_ids=ids, input_features=torch.from_numpy(bundle["input_features"]))
        expected = seen.pop()[0, 1:-1].numpy()
        assert rows.shape == expected.shape
        assert np.allclose(rows, expected, atol=1e-5 * np.abs(expected).max())
    check_on_device(tmp_path, family, bundle, rows)


def test_a_device_hears_as_a_cpu_and_missing_weights_are_named(tmp_path: Path) -> None:
    """Whether all are missing, which the router sees, or one is, which the shard finds."""
    make_folder(tmp_path, "qwen2_audio")
    model, _ = find_served_images(tmp_path)
    assert model is not None
    longest = model.describe_longest(600)
    assert make_longest(longest)["input_features"].shape == (1, 8, 3000)
    settings = ShardSettings(model_path=tmp_path, device="cpu", longest_sound=longest)
    cores = os.sched_getaffinity(0)
    encoder = load_encoder(settings, cores)
    bundle = FeatureExtractor("whisper", EXTRACTOR).extract(as_floats(make_samples(3.01)))
    expected = encoder.encode(bundle).rows
    assert expected.shape == (75, 64)
    with pytest.raises(ValueError, match="has no pixels"):
        encoder.encode({"pixel_values": np.zeros((1, 3, 8, 8), np.uint8)})

    check_on_device(tmp_path, "qwen2_audio", bundle, expected)

    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    (bias,) = (name for name in tensors if name.endswith("multi_modal_projector.linear.bias"))
    del tensors[bias]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"no tensor .*linear.bias', which its tower needs"):
        load_encoder(settings, cores)
    text = {name: each for name, each in tensors.items() if "audio_tower" not in name}
    save_file(text, file, {"format": "pt"})
    model, why = find_served_images(tmp_path)
    assert model is None and why is not None and "has no weights for it" in why


def test_what_transformers_keeps_in_float32_is_kept(tmp_path: Path) -> None:
    """To the bit, in half precision: positions of Voxtral's tower are not rounded."""
    from transformers import AutoModelForMultimodalLM

    make_folder(tmp_path, "voxtral")
    half = torch.bfloat16
    bundle = FeatureExtractor("whisper", EXTRACTOR).extract(as_floats(make_samples(3.01)))
    ours = load_tower(tmp_path, "voxtral", torch.device("cpu"), half, hears=True).encode(bundle)
    theirs: Any = AutoModelForMultimodalLM.from_pretrained(tmp_path, dtype=half).eval()
    kinds = {each.dtype for each in theirs.model.audio_tower.parameters()}
    assert kinds == {half, torch.float32}
    features = torch.from_numpy(bundle["input_features"].copy()).to(half)
    with torch.inference_mode():
        expected = theirs.model.get_audio_features(features, return_dict=True).pooler_output
    assert (ours.rows == expected.float().numpy()).all()
