"""What is said of how a model is served is what its description says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tgi_trio.model.config import read_config
from tgi_trio.model.serving import Serving, describe_serving

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
}


def described(
    folder: Path,
    *,
    reuse: bool = True,
    drafts: bool = True,
    parts: int = 1,
    undivided: str = "",
    **told: Any,
) -> Serving:
    config = {name: told.pop(name) for name in list(told) if name not in ("backend", "device")}
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    return describe_serving(
        read_config(folder),
        **({"backend": "torch", "device": "cpu"} | told),
        dtype="float32",
        parts=parts,
        prefix_reuse=reuse,
        speculates=drafts,
        undivided=undivided,
    )


def test_a_model_of_the_kernels_has_everything(tmp_path: Path) -> None:
    serving = described(tmp_path, backend="kernels avx2")
    assert serving.rows() == (
        *("path: decoder", "backend: kernels avx2", "CPU kernels: yes", "prefix cache: yes"),
        *("drafts: yes", "ranks: yes"),
    )


def test_what_is_missing_has_its_reason(tmp_path: Path) -> None:
    scaled: dict[str, Any] = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    serving = described(tmp_path, reuse=False, num_attention_heads=1, **scaled)
    assert serving.no_prefix_cache == "its rotary frequencies depend on the length of a sequence"
    assert "--cpu-backend" in serving.no_cpu_kernels
    assert "1 attention heads cannot be split over 2 shards" in serving.no_ranks
    undivided = described(tmp_path, parts=2, intermediate_size=96).no_cpu_kernels
    assert "48 numbers of an MLP" in undivided
    assert described(tmp_path, device="cuda:0").no_cpu_kernels == "it is computed on cuda:0"
    assert "--cpu-backend" in described(tmp_path).no_cpu_kernels


def test_what_transformers_runs_says_so(tmp_path: Path) -> None:
    way = "transformers, cached"
    serving = described(
        tmp_path,
        model_type="codegen",
        reuse=False,
        drafts=False,
        backend=way,
        undivided="its attention is its own",
    )
    assert serving.path == serving.backend == way
    assert serving.no_cpu_kernels == "the model runs through transformers"
    assert serving.no_ranks == "its attention is its own"
    assert serving.no_drafts == "transformers computes one token of a sequence a step here"
    assert "a cache of its own" in serving.no_prefix_cache
