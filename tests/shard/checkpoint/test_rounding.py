"""Plain numbers rounded to fewer bits: as near as the formats allow, and in the formats' planes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.gguf.block_types import BY_NAME
from tgi_trio.model.quantised.recognise import MADE_AT_LOAD
from tgi_trio.shard.checkpoint.formats.fp8 import E4M3_NUMBERS
from tgi_trio.shard.checkpoint.formats.gguf import FUNCTIONS, GgufMatrix
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.mapped_file import MappedFile
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.checkpoint.rounding.encoding import RoundedMatrix, round_matrix
from tgi_trio.shard.checkpoint.rounding.gguf_types import ENCODERS
from tgi_trio.shard.checkpoint.rounding.numbers import FP4_BOTH, NF4, nearest_e4m3
from tgi_trio.shard.checkpoint.unpacked import UnpackedMatrix, unpack_matrix

Array = np.ndarray[Any, Any]


def weights(rows: int, inputs: int, seed: int = 0) -> Array:
    """Return rows of different sizes; one is zeros, one has a weight that stands out."""
    draw = np.random.default_rng(seed)
    values = draw.standard_normal((rows, inputs)) * draw.uniform(0.1, 3, (rows, 1))
    values[1] = 0
    values[2, 5] = 40
    return values.astype(np.float32)


def rounded(word: str, values: Array) -> RoundedMatrix:
    found = round_matrix(PlainMatrix(values), ENCODINGS[word])
    assert isinstance(found, RoundedMatrix)
    return found


def put_together(parts: UnpackedMatrix) -> Array:
    """Return what parts stand for, written out number by number."""
    numbers = parts.codes.astype(np.float64) if parts.table is None else parts.table[parts.codes]
    inputs = parts.codes.shape[1]
    runs = parts.scales.shape[1]
    of_input = np.arange(inputs) // (inputs // runs) if parts.order is None else parts.order
    values = numbers * parts.scales[:, of_input]
    return values if parts.lows is None else values - parts.lows[:, of_input]


def test_every_word_has_an_encoding() -> None:
    assert set(ENCODINGS) == set(MADE_AT_LOAD)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_are_those_of_the_reference(name: str) -> None:
    library = pytest.importorskip("gguf", reason="gguf is not installed")
    values = weights(16, 256)
    expected = library.quants.quantize(values, library.GGMLQuantizationType[name])
    assert np.array_equal(ENCODERS[name](values.reshape(-1, 32)).reshape(16, -1), expected)


def test_q4_k_is_nearer_than_as_many_bits_without_scales_of_scales() -> None:
    """Q4_1 has 5 bits a weight, Q4_K 4.5."""
    values = weights(32, 1024)[3:]
    errors = {
        word: np.linalg.norm(rounded(word, values).dequantised() - values)
        for word in ("q4_0", "q4_1", "q4_k")
    }
    assert errors["q4_k"] < errors["q4_1"] < errors["q4_0"]


def test_fp8_is_the_nearest_number_of_all() -> None:
    draw = np.random.default_rng(0)
    values = draw.standard_normal(50_000) * 10 ** draw.uniform(-5, 2.5, 50_000)
    finite = E4M3_NUMBERS[np.isfinite(E4M3_NUMBERS)]
    halfway = (np.sort(finite)[1:] + np.sort(finite)[:-1]) / 2
    every = np.concatenate([values, finite, halfway]).clip(-448, 448).astype(np.float32)
    expected = torch.from_numpy(every).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(nearest_e4m3(every), expected)


@pytest.mark.parametrize(
    ("word", "table"), [("bitsandbytes-nf4", NF4), ("bitsandbytes-fp4", FP4_BOTH)]
)
def test_tables_give_the_nearest_of_their_numbers(word: str, table: Array) -> None:
    values = weights(8, 192)
    planes = rounded(word, values).planes()
    scales = np.repeat(planes["scales"], 64, axis=1)
    assert np.array_equal(planes["scales"], np.abs(values.reshape(8, 3, 64)).max(axis=2))
    distances = np.abs(values[..., None] - scales[..., None] * table)
    taken = np.take_along_axis(distances, planes["codes"][..., None].astype(int), axis=2)[..., 0]
    assert (taken <= distances.min(axis=2) * (1 + 1e-5) + 1e-7).all()


def test_four_bits_are_within_half_a_step() -> None:
    values = weights(8, 384)
    matrix = rounded("int4", values)
    planes = matrix.planes()
    assert (matrix.group, planes["scales"].shape) == (128, (8, 3))
    assert np.array_equal(planes["scales"], planes["scales"].astype(np.float16))
    steps = np.repeat(planes["scales"], 128, axis=1)
    # Half a step for the code, half for the zero point, and what float16 rounds of 15 steps.
    assert (np.abs(matrix.dequantised() - values) <= steps * 1.01).all()


@pytest.mark.parametrize("word", ENCODINGS)
def test_planes_stand_for_the_rounded_numbers(word: str) -> None:
    matrix = rounded(word, weights(40, 512))
    parts = unpack_matrix(matrix)
    assert parts is not None
    np.testing.assert_allclose(put_together(parts), matrix.dequantised(), rtol=1e-5, atol=1e-5)
    assert matrix.bits <= 8 and matrix.shape == (40, 512)


@pytest.mark.parametrize("word", ENCODINGS)
def test_parts_have_the_numbers_of_the_whole(word: str) -> None:
    values = weights(40, 1024)
    whole = rounded(word, values).dequantised()
    for rows, columns in ((slice(3, 9), slice(256, 768)), (slice(0, 40), slice(40, 1000))):
        part = rounded(word, values).rows(rows).columns(columns)
        assert np.array_equal(part.dequantised(), whole[rows, columns])
        assert part.columns(slice(8, 16)).dequantised().shape[1] == 8
    aligned = rounded(word, values).columns(slice(256, 768))
    if ENCODINGS[word].group(1024) <= 256:
        parts = unpack_matrix(aligned)
        assert parts is not None
        np.testing.assert_allclose(put_together(parts), whole[:, 256:768], rtol=1e-5, atol=1e-5)
        with pytest.raises(ModelLoadError, match="split a group"):
            rounded(word, values).columns(slice(8, 768)).planes()


def test_what_does_not_fit_falls_back_or_stays() -> None:
    for inputs, coding in ((256, "Q4_K"), (96, "Q5_0"), (40, "numbers")):
        matrix = round_matrix(PlainMatrix(weights(4, inputs)), ENCODINGS["q4_k"])
        assert matrix.coding == coding
    assert round_matrix(PlainMatrix(weights(4, 40)), ENCODINGS["fp8"]).coding == "e4m3"
    assert round_matrix(PlainMatrix(weights(4, 64)), None).coding == "numbers"


@pytest.mark.parametrize("word", ENCODINGS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_refused(tmp_path: Path, word: str, bad: float) -> None:
    values = weights(4, 256)
    values[3, 200] = bad
    (tmp_path / "model.safetensors").write_bytes(values.tobytes())
    file = MappedFile(tmp_path / "model.safetensors", gives_back=False)
    exact = PlainMatrix(file.data.view(np.float32).reshape(4, 256), file)
    matrix = round_matrix(exact, ENCODINGS[word])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is infinite or not a number"):
        matrix.dequantised()


@pytest.mark.parametrize(
    "name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K"]
)
def test_blocks_of_files_are_taken_apart_exactly(tmp_path: Path, name: str) -> None:
    kind, draw = BY_NAME[name], np.random.default_rng(0)
    blocks = draw.integers(0, 256, (6, 2, kind.bytes), dtype=np.uint8)
    halves = draw.standard_normal((6, 2, 2)).astype(np.float16).view(np.uint8)
    place = slice(kind.bytes - 2, kind.bytes) if name == "Q6_K" else slice(0, 4)
    blocks[..., place] = halves[..., : place.stop - place.start]
    (tmp_path / "model.gguf").write_bytes(blocks.tobytes())
    file = MappedFile(tmp_path / "model.gguf", gives_back=False)
    matrix = GgufMatrix(kind, file.data.reshape(blocks.shape), file, range(2 * kind.weights))
    parts = unpack_matrix(matrix)
    assert parts is not None
    expected = FUNCTIONS[name](blocks.reshape(-1, kind.bytes)).reshape(6, -1)
    assert math.isfinite(expected.sum())
    np.testing.assert_allclose(put_together(parts), expected, rtol=1e-5, atol=1e-4)
