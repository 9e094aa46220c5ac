"""The bare model decodes behind made-up K, V and states, on every backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness import checkpoints
from bench.model.bare import BareModel

SMALL_HYBRID = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": 512,
}


@pytest.mark.parametrize("backend", ["kernels", "torch"])
def test_rows_decode_behind_what_counts_as_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setitem(checkpoints.SHAPES, "H", checkpoints.SHAPES["H"] | SMALL_HYBRID)
    model = BareModel(checkpoints.make("H", tmp_path), backend, threads=1, dtype="float32")
    assert model.runner.info.backend.startswith("kernels") == (backend == "kernels")
    model.hold([20, 3], 4, cached=True)
    before = [row.length for row in model._batch.rows]
    assert before == [20, 3] and all(model.step() > 0 for _ in range(3))
    assert [row.length for row in model._batch.rows] == [23, 6]
