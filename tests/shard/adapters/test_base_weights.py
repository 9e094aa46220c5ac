"""The norms and biases of a base, whatever its matrices are stored like and whoever else reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tgi_trio.model.adapters.sites import adaptable_linears
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.adapters import base_weights
from tgi_trio.shard.adapters.base_weights import BaseWeights
from tgi_trio.shard.checkpoint.numbers import Floats

DATA = Path(__file__).parents[2] / "conversion" / "data"


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("at_once", [1, 40, 1 << 17])
def test_norms_of_any_rows(model: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_weights, "_AT_ONCE", at_once)
    config = read_config(DATA / model / "base")
    spec = decoder_spec(config)
    assert spec is not None
    stored = load_file(DATA / model / "base" / "model.safetensors")
    draw, rests = np.random.default_rng(0), list[int]()
    with BaseWeights(config, spec) as base:
        for _, linear in adaptable_linears(spec):
            matrix = linear.pieces[0].matrix
            weight = stored[matrix.name].T if matrix.transposed else stored[matrix.name]
            a = draw.standard_normal((3, matrix.columns), np.float32)
            b = draw.standard_normal((matrix.rows, 3), np.float32)
            rows = slice(1, matrix.rows - 2)
            found = base.measure_rows(matrix, rows, a, b[rows], lambda: rests.append(0))
            expected = np.linalg.norm((weight + b @ a)[rows].astype(np.float64), axis=1)
            np.testing.assert_allclose(found, expected, rtol=1e-5)
            bias = stored[matrix.bias] if matrix.bias else np.zeros(matrix.rows)
            np.testing.assert_array_equal(base.read_bias(matrix), bias)
    assert rests


def test_a_copy_may_be_rounded_and_no_more() -> None:
    config = read_config(DATA / "llama" / "base")
    spec = decoder_spec(config)
    assert spec is not None
    *_, (_, head) = adaptable_linears(spec)
    matrix = head.pieces[0].matrix
    own = load_file(DATA / "llama" / "base" / "model.safetensors")[matrix.name]
    with BaseWeights(config, spec) as base:
        for factor, same in ((1.0, True), (1.004, True), (1.1, False)):

            def read(rows: slice, by: float = factor) -> Floats:
                return own[rows] * np.float32(by)

            assert base.is_copied(matrix, read, lambda: None) == same
