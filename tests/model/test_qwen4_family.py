"""What Qwen 4's config.json says of its index and n-grams, and what makes no sense there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model.test_layer_kinds import SIZES, spec_of
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.ngrams import find_primes
from tgi_trio.model.specs.pooled_index import PooledIndexSpec

QWEN4: dict[str, Any] = SIZES | {
    "model_type": "qwen4_exp_text",
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 16,
    "ngram_vocab_size_base": 50,
    "eos_token_id": [7, 1],
}


def test_qwen_4_numbers_layers_with_ngrams_from_one(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, QWEN4 | {"ple_layer_ids": [9, 2]})
    assert [bool(layer.ngrams) for layer in spec.layers] == [i in (1, 8) for i in range(12)]
    first, second = (layer.ngrams for layer in spec.layers if layer.ngrams)
    assert first.end == 7 and first.rows + second.rows == find_primes(50, 0, 32)
    index = PooledIndexSpec(heads=2, dim=16, size=16, most=4)
    assert [layer.pooled for layer in spec.layers] == [None, None, None, index] * 3


def test_qwen_4_without_attention_needs_no_index(tmp_path: Path) -> None:
    values = {key: value for key, value in QWEN4.items() if not key.startswith("indexer")}
    spec = spec_of(tmp_path, values | {"layer_types": ["linear_attention"] * 12})
    assert not any(layer.pooled or layer.attends for layer in spec.layers)


@pytest.mark.parametrize(
    "change",
    [{"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {"hidden_act": "gelu"}],
    ids=["by length", "activation"],
)
def test_what_qwen_4_has_in_none_of_its_checkpoints(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN4 | change))
    assert decoder_spec(read_config(tmp_path)) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"indexer_kv_heads": 2}, "indexer_kv_heads is not 1"),
        ({"indexer_budget": 60}, "60, which is no multiple of 16"),
        ({"indexer_budget": None}, "no 'indexer_budget'"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids has 4, which is no layer of linear attention"),
        ({"ple_layer_ids": [13]}, "ple_layer_ids has 13"),
        ({"ple_layer_ids": [1], "eos_token_id": None}, "no eos_token_id"),
        ({"ple_layer_ids": [1], "ple_embed_dim": 40}, "40, which 16 heads do not divide"),
    ],
)
def test_what_makes_no_qwen_4(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        spec_of(tmp_path, QWEN4 | change)
