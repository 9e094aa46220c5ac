"""Whether images are served, known before a shard starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tgi_trio.router.media import served_images
from tgi_trio.router.media.served_images import find_served_images

TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_kv_shared_layers": 0,
}


def test_a_server_knows_why_it_shows_none(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama"}))
    assert find_served_images(tmp_path) == (None, None)
    config.write_text(json.dumps({"model_type": "florence2", "vision_config": {"depth": [1]}}))
    model, why = find_served_images(tmp_path)
    assert model is None and why is not None and "model type 'florence2'" in why
    config.write_text(json.dumps({"model_type": "fuyu"}))  # which has no tower
    model, why = find_served_images(tmp_path)
    assert model is None and why is not None and "model type 'fuyu' has one image" in why


def test_packages_that_a_tower_needs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"PIL": True, "timm": True, "torchvision": False}
    monkeypatch.setattr(served_images, "find_spec", there.get)
    whole = {"model_type": "gemma3n", "text_config": TEXT, "vision_config": {"a": 1}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 768, "width": 768}}')
    model, why = find_served_images(tmp_path)
    assert model is None and why is not None
    assert "needs torchvision, pip install 'tgi-trio[timm]'" in why
    there["torchvision"] = True
    model, why = find_served_images(tmp_path)
    assert model is not None and model.family == "siglip" and why is None


def test_a_text_that_is_not_ours_is_known_before_a_shard_starts(tmp_path: Path) -> None:
    """Gemma 4 whose prompts see both ways is transformers' to compute."""
    vision = {"model_type": "gemma4_vision"}
    text = {"model_type": "gemma4_text", "use_bidirectional_attention": "all"}
    whole = {"model_type": "gemma4", "text_config": text, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "preprocessor_config.json").write_text('{"image_seq_length": 4}')
    model, why = find_served_images(tmp_path)
    assert model is None and why is not None and "the text of this gemma4 as a whole" in why
