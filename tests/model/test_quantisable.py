"""What `quantize` cannot write is refused by its name, before work and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tgi_trio.errors import ConfigurationError
from tgi_trio.model.config import read_config
from tgi_trio.model.quantisable import quantisable_spec

CONFIG: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
CASES: dict[str, tuple[dict[str, object], str]] = {
    "lfm2": ({"full_attn_idxs": [1]}, "layers that keep a state per sequence"),
    "deepseek_v32": ({"num_experts_per_tok": 2}, "an index that chooses what tokens attend to"),
    "deepseek_v4": ({"o_groups": 2}, "attention to one key per token"),
    "hy_v4": ({"num_experts_per_tok": 2}, "an index that chooses what tokens attend to"),
    "minimax_m3_vl_text": (
        {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_key_value_heads": 4},
        "an index that chooses what tokens attend to",
    ),
    "qwen4_exp_text": (
        {
            **{"layer_types": ["full_attention"] * 2, "indexer_n_heads": 2, "indexer_kv_heads": 1},
            **{"indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 16},
        },
        "an index that chooses what tokens attend to",
    ),
    "gemma3n_text": (
        {"num_kv_shared_layers": 0},
        "layers with embeddings of their own",
    ),
    "gemma4_text": (
        {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2},
        "layers that read another layer's keys and values",
    ),
    "gpt_oss": ({}, "all experts of a layer in one tensor"),
    "llama4_text": ({}, "all experts of a layer in one tensor"),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_part_that_cannot_be_written_is_named(tmp_path: Path, kind: str) -> None:
    more, part = CASES[kind]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": kind} | more))
    with pytest.raises(ConfigurationError, match=f"'{kind}' has {part}, which quantize cannot"):
        quantisable_spec(read_config(tmp_path), "gptq")
    with pytest.raises(ConfigurationError, match=f"'{kind}' is not written as GGUF"):
        quantisable_spec(read_config(tmp_path), "gguf:q4_0")


def test_torch_is_not_imported_for_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt_oss"}))
    paths = {"model": str(tmp_path), "output": "x", "calibration_text": None}
    numbers = {"group": 32, "damping": 0.01, "samples": 1, "sample_tokens": 8}
    words = paths | numbers | {"by_activation": False, "format": "gptq"}
    code = (
        "import sys; from tgi_trio.shard.quantising.__main__ import main; "
        f"assert main({json.dumps(words)!r}) == 1; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'gpt_oss' has all experts of a layer in one tensor" in done.stderr
