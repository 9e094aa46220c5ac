"""GGUF's blocks and matrices: numbers as llama.cpp's own reference has them, in any cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.gguf_files import q8_0
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import Change
from tgi_trio.model.gguf.block_types import SERVED
from tgi_trio.shard.checkpoint.formats.gguf import (
    FUNCTIONS,
    GgufMatrix,
    row_order,
    unchanged,
)
from tgi_trio.shard.checkpoint.formats.joined_heads import JoinedHeads
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.mapped_file import MappedFile

BLOCK_TYPES = {kind.name: kind for kind in SERVED.values() if not kind.plain}


def test_every_type_of_blocks_is_dequantised() -> None:
    assert FUNCTIONS.keys() == BLOCK_TYPES.keys()


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES.keys() - {"Q8_K"}))
def test_blocks_are_those_of_the_reference(name: str) -> None:
    """Random bytes hold every code and every scale, infinite ones and such as are no numbers."""
    reference = pytest.importorskip("gguf", reason="gguf is not installed")
    kind = BLOCK_TYPES[name]
    number = next(n for n, each in SERVED.items() if each is kind)
    blocks = np.random.default_rng(1).integers(0, 256, (500, kind.bytes), np.uint8)
    theirs = reference.GGMLQuantizationType(number)
    assert theirs.name == name and reference.GGML_QUANT_SIZES[theirs] == (kind.weights, kind.bytes)
    with np.errstate(all="ignore"):
        expected = reference.quants.dequantize(blocks, theirs)
        found = FUNCTIONS[name](blocks)
    assert found.dtype == np.float32 and found.shape == (500, kind.weights)
    np.testing.assert_array_equal(found, expected)


def test_blocks_of_q8_k() -> None:
    """No reference has it: it is what K types are multiplied with."""
    codes = np.arange(-128, 128, dtype=np.int8)
    block = np.concatenate([
        np.array([0.25], "<f4").view(np.uint8), codes.view(np.uint8), np.full(32, 77, np.uint8)
    ])  # fmt: skip
    np.testing.assert_array_equal(FUNCTIONS["Q8_K"](block[None])[0], codes * np.float32(0.25))


def matrix(tmp_path: Path, change: Change | None = None) -> tuple[GgufMatrix, np.ndarray]:
    """Return a matrix [6, 128] of Q8_0 and what it means."""
    values = np.random.default_rng(2).integers(-127, 128, (6, 128)).astype(np.float32)
    values[:, ::32] = 127  # so that every scale is one
    shape, _, content = q8_0(values)
    file = tmp_path / "blocks"
    file.write_bytes(bytes(64) + content)
    mapped = MappedFile(file, gives_back=True)
    blocks = mapped.data[64:].reshape(6, 4, 34)
    order = row_order(change, shape[0])
    exact = values if order is None else values[order]
    return GgufMatrix(BLOCK_TYPES["Q8_0"], blocks, mapped, range(128), order), exact


@pytest.mark.parametrize(
    "change", [None, Change(rotary_heads=1), Change(key_heads=1, queries_each=4)]
)
def test_any_cut_of_a_matrix_is_the_cut_of_its_numbers(
    tmp_path: Path, change: Change | None
) -> None:
    whole, values = matrix(tmp_path, change)
    assert whole.shape == (6, 128) and whole.bits == 8 and whole.group == 32
    np.testing.assert_array_equal(whole.dequantised(), values)
    for rows in (slice(0, 6), slice(2, 5), slice(5, 6)):
        for columns in (slice(0, 128), slice(32, 96), slice(40, 41), slice(31, 33)):
            part = whole.rows(rows).columns(columns)
            assert part.shape == values[rows, columns].shape
            np.testing.assert_array_equal(part.dequantised(), values[rows, columns])
            np.testing.assert_array_equal(
                whole.columns(columns).rows(rows).dequantised(), values[rows, columns]
            )
            inner = part.columns(slice(0, 1))
            np.testing.assert_array_equal(
                inner.dequantised(), values[rows, columns.start : columns.start + 1]
            )


def test_planes_are_whole_blocks(tmp_path: Path) -> None:
    whole, _ = matrix(tmp_path)
    assert whole.columns(slice(32, 96)).planes()["blocks"].shape == (6, 2, 34)
    with pytest.raises(ModelLoadError, match="cut through its blocks of 32"):
        whole.columns(slice(32, 97)).planes()


@pytest.mark.parametrize("change", [None, Change(rotary_heads=1)])
def test_what_has_been_read_is_released(tmp_path: Path, change: Change | None) -> None:
    whole, _ = matrix(tmp_path, change)
    assert whole.place() == (tmp_path / "blocks", 64)
    released: list[tuple[int, int]] = []
    whole.file.release = lambda first, end: released.append((first, end))  # type: ignore[method-assign]
    whole.release()
    whole.columns(slice(32, 64)).release()  # others' bytes lie between: stays
    assert released == [(64, 64 + 6 * 4 * 34)]


def test_rotary_pairs_go_back_to_their_halves() -> None:
    """In the file, a head's rows are 0, half, 1, half + 1, ..."""
    halves = np.arange(16, dtype=np.float32)
    pairs = halves.reshape(2, 2, 4).swapaxes(1, 2).reshape(16)
    np.testing.assert_array_equal(unchanged(pairs, Change(rotary_heads=2)), halves)
    np.testing.assert_array_equal(unchanged(halves, Change(plus_one=True)), halves - 1)
    assert unchanged(halves, None) is halves


def test_rows_of_queries_keys_and_values_go_back_to_their_heads() -> None:
    """In the file: all queries, all keys, all values."""
    rows = np.arange(16, dtype=np.float32)  # two key heads of two queries each, of two rows
    by_head = rows.reshape(2, 4, 2)
    by_kind = np.concatenate([by_head[:, :2].ravel(), by_head[:, 2].ravel(), by_head[:, 3].ravel()])
    np.testing.assert_array_equal(unchanged(by_kind, Change(key_heads=2, queries_each=2)), rows)


@pytest.mark.parametrize("rows", [slice(0, 20), slice(3, 17), slice(10, 11), slice(5, 10)])
def test_halves_of_a_matrix_are_joined_by_head(rows: slice) -> None:
    rng = np.random.default_rng(3)
    heads, latent, key, value = 2, 8, 4, 6
    keys = rng.standard_normal((heads, key, latent)).astype(np.float32)
    values = rng.standard_normal((heads, value, latent)).astype(np.float32)
    whole = np.concatenate([keys, values], axis=1).reshape(-1, latent)
    turned = np.ascontiguousarray(keys.swapaxes(1, 2)).reshape(-1, key)
    joined = JoinedHeads(
        PlainMatrix(turned), PlainMatrix(values.reshape(-1, latent)), heads, range(20), range(8)
    )
    part = joined.rows(rows).columns(slice(2, 7))
    assert part.shape == (rows.stop - rows.start, 5)
    np.testing.assert_array_equal(part.dequantised(), whole[rows, 2:7])
    np.testing.assert_array_equal(part.planes()["numbers"], whole[rows, 2:7])
    (inner,) = part.rows(slice(0, 1)).dequantised()
    np.testing.assert_array_equal(inner, whole[rows.start, 2:7])
