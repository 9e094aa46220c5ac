"""What GLM 5.3 Flash's files say, as they are published and as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.decoder import DecoderSpec

PUBLISHED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "table": {
        "linear_attn_config": {
            **{"head_dim": 32, "num_heads": 8, "short_conv_kernel_size": 3},
            **{"gate_lower_bound": None, "safe_gate": True},
        },
    },
    "unbounded": {"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}},
    "bound": {"linear_attn_config": {"gate_lower_bound": -2.0}, "num_hidden_layers": 5},
    "pattern": {
        "num_hidden_layers": 4,
        "index_topk_pattern": "FFSF",
        "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "dense", "sparse", "dense"],
    },
}


def spec_of(folder: Path, text: dict[str, Any]) -> DecoderSpec | None:
    folder.mkdir(exist_ok=True)
    config = {"model_type": "glm5_next", "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    return decoder_spec(read_config(folder))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_says_what_transformers_makes_of_it(tmp_path: Path, name: str) -> None:
    from transformers import AutoConfig

    said = PUBLISHED[name]
    theirs = AutoConfig.for_model("glm5_next_text", **said)
    published = spec_of(tmp_path / "published", {"model_type": "glm5_next_text"} | said)
    today = spec_of(tmp_path / "today", theirs.to_dict())
    assert published is not None and published == today
    mixer = published.layers[0].mixer
    assert mixer is not None and published.index is not None
    assert getattr(mixer, "least_decay") == (theirs.linear_lower_bound or 0.0)  # noqa: B009
    assert getattr(mixer, "taps") == theirs.linear_conv_kernel_dim  # noqa: B009


@pytest.mark.parametrize(
    "changes",
    [
        {"swiglu_limit": 0.0},
        {"hidden_act": "gelu"},
        {"qk_rope_head_dim": 8},
        {"q_lora_rank": None},
        {"index_topk": 0},
        {"index_kpool": 0},
        {"index_kpool_always_select_tail": False},
        {"linear_lower_bound": 0.0},
        {"indexer_types": ["full"] * 3 + ["shared"] + ["full"] * 41},  # behind a delta rule
    ],
    ids=str,
)
def test_other_variants_are_none_of_ours(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert spec_of(tmp_path, {}) is not None
    assert spec_of(tmp_path, changes) is None


def test_runs_make_up_what_is_attended_to(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="index_topk is 100, which is not in runs of 16"):
        spec_of(tmp_path, {"index_topk": 100})
