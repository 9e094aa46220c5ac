"""What MiniMax-M3's files say of its index and its layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.block_index import BlockIndexSpec
from tgi_trio.model.specs.decoder import DecoderSpec

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
PUBLISHED: dict[str, Any] = {
    "rope_theta": 4e6,
    "rotary_dim": 8,
    "hidden_act": "swigluoai",
    "moe_layer_freq": [0, 1, 1],
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 24,
        "sparse_block_size": 4,
        "sparse_topk_blocks": 3,
        "sparse_local_block": 2,
        "sparse_attention_freq": [0, 0, 1],
    },
}


def spec_of(folder: Path, values: dict[str, Any]) -> DecoderSpec | None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return decoder_spec(read_config(folder))


def test_a_published_file_says_what_transformers_makes_of_it(tmp_path: Path) -> None:
    from transformers import AutoConfig

    text = {"model_type": "minimax_m3_vl_text"} | SIZES | PUBLISHED
    published = spec_of(tmp_path / "published", text)
    theirs = AutoConfig.for_model(**text)
    theirs.save_pretrained(tmp_path / "theirs")
    saved = json.loads((tmp_path / "theirs" / "config.json").read_text())
    today = spec_of(tmp_path / "today", saved)
    assert published is not None and today is not None
    assert published.layers[2].blocks == BlockIndexSpec(dim=24, size=4, most=3, local=2)
    for layer, other in zip(published.layers, today.layers, strict=True):
        assert (layer.blocks, layer.experts) == (other.blocks, other.experts)
        assert layer.rotary and other.rotary
        turned = [(each.dim, each.theta) for each in (layer.rotary, other.rotary)]
        assert turned == [(8, 4e6)] * 2
    assert [layer.experts is not None for layer in today.layers] == [False, True, True]
    assert published.mlp_width == today.mlp_width == 12288
    assert published.activation == today.activation == "quick_gelu"


@pytest.mark.parametrize(
    "changes",
    [
        {"swiglu_alpha": 1.0},
        {"swiglu_limit": 0.0},
        {"index_n_heads": 4},
        {"index_head_dim": 4},
        {"index_local_blocks": 17},
        {"index_local_blocks": 0, "index_topk_blocks": 0},
        {"index_block_size": 0},
    ],
    ids=str,
)
def test_other_gates_and_indices_are_none_of_ours(tmp_path: Path, changes: dict[str, Any]) -> None:
    plain = {"model_type": "minimax_m3_vl_text", "index_n_heads": 2} | SIZES
    assert spec_of(tmp_path, plain) is not None
    assert spec_of(tmp_path, plain | changes) is None
