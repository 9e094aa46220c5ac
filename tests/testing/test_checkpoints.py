"""Weights of tiny checkpoints: what passes a matrix keeps its size, whatever it is called."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tgi_trio.testing.checkpoints import make_checkpoint


@pytest.mark.parametrize(
    ("family", "matrix"),
    [
        ("qwen2_moe", "model.layers.0.mlp.shared_expert.gate_proj.weight"),
        ("qwen2_moe", "model.layers.0.mlp.shared_expert_gate.weight"),
        ("granitemoehybrid", "model.layers.0.shared_mlp.input_linear.weight"),
    ],
)
def test_what_is_shared_is_a_matrix_like_any_other(
    tmp_path: Path, family: str, matrix: str
) -> None:
    tensors = load_file(make_checkpoint(tmp_path, family) / "model.safetensors")
    inputs = tensors[matrix].shape[-1]
    assert float(tensors[matrix].std()) == pytest.approx(2.0 / inputs**0.5, rel=0.3)
    assert float(tensors["model.embed_tokens.weight"].std()) == pytest.approx(1.0, rel=0.1)


def test_an_embedding_may_be_called_shared(tmp_path: Path) -> None:
    """T5's, which is a head as well: those are smaller, but not by their width."""
    shared = load_file(make_checkpoint(tmp_path, "t5") / "model.safetensors")["shared.weight"]
    assert float(shared.std()) == pytest.approx(0.3, rel=0.1)
