"""Features of sounds are those that transformers' whole models put among a prompt's embeddings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.router.media.sound_files import as_floats, make_samples
from tests.shard.media.images_support import make_folder
from tests.shard.media.pictures import picture
from tests.shard.media.timm_support import use_timm
from tests.shard.torch_backend.interpreter import need_triton
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.router.media.served_images import find_served_images
from tgi_trio.shard.media.largest import make_longest
from tgi_trio.shard.media.loading import load_encoder
from tgi_trio.shard.media.tower import load_tower
from tgi_trio.testing.checkpoints import VOCAB_SIZE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

need_triton()

from tests.shard.media.audio_device import check_on_device  # noqa: E402  (it imports Triton)

pytestmark = pytest.mark.usefixtures("one_thread")

EXTRACTOR = FeatureExtractor("gemma3n", {})
FEATURES = 188  # of any sound


def test_features_of_gemma3n_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """Of a short sound, of one whose end is silence, and of the longest; and of the mark behind."""
    from transformers import AutoModelForImageTextToText

    use_timm()
    folder = make_folder(tmp_path, "gemma3n")
    whole: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    soft, end = VOCAB_SIZE - 2, VOCAB_SIZE - 1  # of the vocabulary of sounds
    for each in (whole.config, whole.model.config):
        each.audio_token_id, each.eoa_token_id = soft, end
    tower = load_tower(folder, "gemma3n", torch.device("cpu"), torch.float32, hears=True)
    tower._model.config.eoa_token_id = end
    seen: list[Any] = []
    whole.model.language_model.register_forward_pre_hook(
        lambda module, args, given: seen.append(given["inputs_embeds"]), with_kwargs=True
    )
    ids = torch.tensor([[5, *[soft] * FEATURES, end, 6]])
    for seconds in (0.4, 3.01, 30.0):
        bundle = EXTRACTOR.extract(as_floats(make_samples(seconds)))
        given = {name: torch.from_numpy(value) for name, value in bundle.items()}
        with torch.no_grad():
            whole.model(input_ids=ids, **given)
        rows = tower.encode(bundle).rows
        expected = seen.pop()[0, 1 : 2 + FEATURES].numpy()
        assert rows.shape == expected.shape
        assert np.allclose(rows, expected, atol=1e-5), np.abs(rows - expected).max()


TOWER = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"subsampling_conv_channels": [8, 4], "output_proj_dims": 16},
}
OWN = {"feature_size": 8}


def test_where_weights_for_sounds_are_missing_images_are_served(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether all are, which the router sees, or one is, which the shard finds. Where none is, a
    device finds what the CPU does.
    """
    make_wrapped(tmp_path, "gemma4", whole={"audio_config": TOWER})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_normalize": False}))
    told = json.dumps({"feature_extractor": OWN})
    (tmp_path / "processor_config.json").write_text(told)
    model, _ = find_served_images(tmp_path)
    assert model is not None and "audio" in model.others and "audio" not in model.lacking
    longest = model.describe_longest(600)
    bundle = make_longest(longest)
    assert bundle["input_features"].shape == (1, 2999, 8), "of 30 s, which it hears"
    settings = ShardSettings(model_path=tmp_path, device="cpu", longest_sound=longest)
    cores = os.sched_getaffinity(0)
    expected = load_encoder(settings, cores).encode(bundle).rows
    assert expected.shape == (750, 64)

    check_on_device(tmp_path, "gemma4", bundle, expected)

    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.embed_audio.embedding_projection.weight"]
    save_file(tensors, file, {"format": "pt"})
    encoder = load_encoder(settings, cores)
    assert "audio is not served: " in capfd.readouterr().err
    with pytest.raises(ValueError, match="computes no audio of this model"):
        encoder.encode(bundle)
    assert len(encoder.encode(picture("gemma4", 1).bundle).rows)

    others = {name: each for name, each in tensors.items() if "audio" not in name}
    save_file(others, file, {"format": "pt"})
    model, why = find_served_images(tmp_path)
    assert model is not None and why is None and not model.describe_longest(600)
    assert model.lacking == ("audio",) and "has no weights for it" in model.unserved["audio"]
