"""The norms and biases of a base, whatever its matrices are stored like and whoever else reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.model.adapters.config import CONFIG
from tgi_trio.model.adapters.files import WEIGHTS
from tgi_trio.model.adapters.sites import adaptable_linears
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.matrices.references import MatrixRef, every_unit
from tgi_trio.shard.adapters import base_weights
from tgi_trio.shard.adapters.base_weights import BaseWeights
from tgi_trio.shard.adapters.known_norms import KnownNorms
from tgi_trio.shard.adapters.parts import AdapterPart
from tgi_trio.shard.adapters.reader import AdapterReader
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

            assert base.is_copied(matrix, matrix.rows, read, lambda: None) == same


def test_norms_are_measured_once_for_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded again it has the same numbers without its base; one with other tensors has not."""
    config = read_config(DATA / "llama" / "base")
    spec = decoder_spec(config)
    assert spec is not None
    folder = Path(shutil.copytree(DATA / "llama" / "adapter", tmp_path / "adapter"))
    tensors = load_file(folder / WEIGHTS)
    for name, each in [*tensors.items()]:
        if name.endswith("lora_B.weight"):
            place = name.removesuffix("lora_B.weight")
            tensors[f"{place}lora_magnitude_vector"] = np.ones(len(each), np.float32)
    save_file(tensors, folder / WEIGHTS)
    values = json.loads((folder / CONFIG).read_text()) | {"use_dora": True}
    (folder / CONFIG).write_text(json.dumps(values))
    reader = AdapterReader(config, spec, every_unit, 64)
    measured: list[str] = []
    measure = BaseWeights.measure_rows

    def count(self: BaseWeights, matrix: MatrixRef, *rest: Any) -> Floats:
        measured.append(matrix.name)
        return measure(self, matrix, *rest)

    monkeypatch.setattr(BaseWeights, "measure_rows", count)

    def load() -> list[AdapterPart]:
        with reader.open(AdapterOrder(1, folder)) as numbers:
            return [part for parts in numbers.sites.values() for part in parts]

    first, times = load(), len(measured)
    assert times and any(part.gains is not None for part in first)
    for one, other in zip(first, load(), strict=True):
        np.testing.assert_array_equal(one.b, other.b)
        assert (one.gains is None) == (other.gains is None)
        if one.gains is not None and other.gains is not None:
            np.testing.assert_array_equal(one.gains, other.gains)
    assert len(measured) == times
    save_file({name: each * 2 for name, each in tensors.items()}, folder / WEIGHTS)
    load()
    assert len(measured) == 2 * times


def test_norms_of_the_adapters_loaded_last_are_kept() -> None:
    known = KnownNorms(most_bytes=100)
    for name in (b"a", b"b", b"a", b"c"):
        known.of(name)["q_proj", 0, 20] = np.zeros(20, np.float32)  # 80 bytes
    assert known.of(b"c") and known.of(b"a") and not known.of(b"b")
