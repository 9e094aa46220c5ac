"""Weights by name: with and without their base, and only in formats that are served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import read_config
from tgi_trio.model.matrices.references import (
    LinearPiece,
    LinearRef,
    MatrixRef,
    every_unit,
    run_of,
    whole_units,
)
from tgi_trio.shard.checkpoint.lookup import open_checkpoint, read_bias, read_linear

Make = Callable[..., Path]


@pytest.fixture
def folder(checkpoint: Make, tmp_path: Path) -> Path:
    """A Llama checkpoint that the kernels fit, and that a test may damage."""
    source = checkpoint("llama", head_dim=32, attention_bias=True)
    return Path(shutil.copytree(source, tmp_path / "llama"))


@pytest.mark.parametrize("stored", ["model.", ""])
def test_names_may_leave_out_their_base(folder: Path, stored: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    renamed = {name.replace("model.", stored, 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, file)
    with open_checkpoint(read_config(folder), "model.") as weights:
        assert "model.norm.weight" in weights and "model.norm.bias" not in weights
        matrix = weights.matrix("model.embed_tokens.weight", (512, 64))
        vector = weights.vector("model.norm.weight", 64)
        head = weights.matrix("lm_head.weight", (512, 64))
    expected = tensors["model.embed_tokens.weight"].numpy()
    assert np.array_equal(matrix.dequantised(), expected)  # the file is closed
    assert np.array_equal(head.dequantised(), tensors["lm_head.weight"].numpy())
    assert np.array_equal(vector, tensors["model.norm.weight"].numpy())


def test_a_linear_of_pieces(folder: Path) -> None:
    """Every second head of one matrix, behind the last rows of another without a bias."""
    at, tensors = "model.layers.1.self_attn", load_file(folder / "model.safetensors")
    query = MatrixRef(f"{at}.q_proj.weight", 128, 64, f"{at}.q_proj.bias")
    key = MatrixRef(f"{at}.k_proj.weight", 64, 64)
    heads = run_of("heads", 4, 32)
    linear = LinearRef(
        (
            LinearPiece(key, run_of("kv_heads", 1, 32, first=32), whole_units(64)),
            LinearPiece(query, heads, whole_units(64)),
        )
    )
    with open_checkpoint(read_config(folder), "model.") as weights:
        whole = read_linear(weights, linear, every_unit).dequantised()
        part = read_linear(weights, linear, lambda u: slice(2, 4) if u is heads else slice(0, 1))
        bias = read_bias(weights, linear, every_unit)
    rows = torch.cat((tensors[key.name][32:], tensors[query.name])).numpy()
    assert np.array_equal(whole, rows)
    assert np.array_equal(part.dequantised(), np.concatenate((rows[:32], rows[96:])))
    assert bias is not None
    assert not bias[:32].any() and np.array_equal(bias[32:], tensors[query.bias].numpy())


def test_a_format_that_nobody_claims_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    said = {"quantization_config": {"quant_method": "tomorrow"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    with pytest.raises(ModelLoadError, match="quantised weights in the format tomorrow"):
        open_checkpoint(read_config(folder))
