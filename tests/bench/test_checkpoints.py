"""The random-weight checkpoints of the benchmarks load, and every id of theirs is text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.harness import checkpoints
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.testing.checkpoints import make_tokenizer

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 5000,
}


@pytest.mark.parametrize("shape", sorted(checkpoints.SHAPES))
def test_a_shape_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    small = checkpoints.SHAPES[shape] | _SMALL
    if "layer_types" in small:
        small |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    monkeypatch.setitem(checkpoints.SHAPES, shape, small)
    folder = checkpoints.make(shape, tmp_path / shape)
    assert (
        load_torch_runner(ShardSettings(model_path=folder), read_config(folder)).info.vocab_size
        == 5000
    )
    written = (folder / "model.safetensors").stat().st_mtime_ns
    checkpoints.make(shape, folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_every_id_is_text(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, 5000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 5000
    words = [tokenizer.decode([i]) for i in range(259, 5000)]
    assert len(set(words)) == len(words) and all(word.isalpha() for word in words)
    assert tokenizer.decode(tokenizer.encode("Whole text, \u00e9t\u00e9!").ids) == (
        "Whole text, \u00e9t\u00e9!"
    )
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["bos_token"] == "<s>"
