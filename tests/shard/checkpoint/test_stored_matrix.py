"""Every stored matrix, whatever its format, can be cut and stacked as plain numbers can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.formats.int8 import Int8Matrix, to_int8
from tgi_trio.shard.checkpoint.formats.plain import PlainFormat
from tgi_trio.shard.checkpoint.numbers import to_float32
from tgi_trio.shard.checkpoint.safetensors_files import SafetensorsFiles
from tgi_trio.shard.checkpoint.stored_matrix import Stack, StoredMatrix

ROWS, COLUMNS = 24, 40
NUMBERS = np.random.default_rng(5).standard_normal((ROWS, COLUMNS), np.float32)


def container(folder: Path, **tensors: np.ndarray[Any, Any]) -> SafetensorsFiles:
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsFiles(folder)


def plain(folder: Path) -> StoredMatrix:
    return PlainFormat().matrix(container(folder, a=NUMBERS), "a", (ROWS, COLUMNS))


def half(folder: Path) -> StoredMatrix:
    files = container(folder, a=NUMBERS.astype(np.float16))
    return PlainFormat().matrix(files, "a", (ROWS, COLUMNS))


def transposed(folder: Path) -> StoredMatrix:
    files = container(folder, a=np.ascontiguousarray(NUMBERS.T))
    return PlainFormat().matrix(files, "a", (ROWS, COLUMNS), transposed=True)


def rounded(folder: Path) -> StoredMatrix:
    return Int8Matrix(plain(folder))


CODES, SCALES = to_int8(NUMBERS)
# format, what its numbers are, bits, inputs per scale
CASES: dict[str, tuple[Callable[[Path], StoredMatrix], np.ndarray[Any, Any], int, int]] = {
    "float32": (plain, NUMBERS, 32, 0),
    "float16": (half, NUMBERS.astype(np.float16), 16, 0),
    "transposed": (transposed, NUMBERS, 32, 0),
    "int8": (rounded, CODES * SCALES[:, None], 8, COLUMNS),
}
formats = pytest.mark.parametrize(("make", "numbers", "bits", "group"), CASES.values(), ids=CASES)


@formats
def test_parts_have_the_numbers_of_the_whole(
    tmp_path: Path, make: Any, numbers: Any, bits: int, group: int
) -> None:
    matrix = make(tmp_path)
    assert (matrix.shape, matrix.bits, matrix.group) == ((ROWS, COLUMNS), bits, group)
    assert np.array_equal(matrix.dequantised(), numbers)
    some = matrix.rows(slice(3, 21)).columns(slice(8, 32))
    assert some.shape == (18, 24)
    assert np.array_equal(some.dequantised(), numbers[3:21, 8:32])
    fewer = some.columns(slice(1, 5)).rows(slice(16, 30))  # which ends where the matrix does
    assert fewer.shape == (2, 4)
    assert np.array_equal(fewer.dequantised(), numbers[19:21, 9:13])


@formats
def test_matrices_lie_below_each_other(
    tmp_path: Path, make: Any, numbers: Any, bits: int, group: int
) -> None:
    matrix = make(tmp_path)
    stack = Stack([matrix.rows(slice(20, 24)), matrix.rows(slice(0, 2)), matrix])
    assert stack.shape == (ROWS + 6, COLUMNS)
    expected = np.concatenate([numbers[20:], numbers[:2], numbers]).astype(np.float32)
    assert np.array_equal(to_float32(stack.dequantised()), expected)
    assert np.array_equal(Stack([matrix]).dequantised(), numbers)


def test_planes_are_what_is_stored(tmp_path: Path) -> None:
    assert np.array_equal(plain(tmp_path).planes()["numbers"], NUMBERS)
    planes = rounded(tmp_path).columns(slice(4, 9)).planes()
    assert np.array_equal(planes["codes"], CODES[:, 4:9]) and planes["codes"].dtype == np.int8
    assert np.array_equal(planes["scales"], SCALES)


def test_whole_rows_are_released_and_nothing_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = container(tmp_path, a=NUMBERS, b=NUMBERS)
    released: list[tuple[int, int]] = []
    begin = files.tensor("a").first
    monkeypatch.setattr(
        "tgi_trio.shard.checkpoint.mapped_file.MappedFile.release",
        lambda self, first, end: released.append((first - begin, end - begin)),
    )
    matrix = Int8Matrix(PlainFormat().matrix(files, "a", (ROWS, COLUMNS)))
    matrix.rows(slice(2, 4)).release()
    matrix.exact.columns(slice(0, 8)).release()
    assert released == [(2 * COLUMNS * 4, 4 * COLUMNS * 4)]
    assert matrix.rows(slice(1, 2)).place() == (files.tensor("a").file.path, begin + COLUMNS * 4)


def test_what_is_not_as_the_model_is_described_is_named(tmp_path: Path) -> None:
    files = container(tmp_path, a=NUMBERS, b=CODES)
    with pytest.raises(ModelLoadError, match=r"'a' in .* has shape \[24, 40\], .* \[40, 24\]"):
        PlainFormat().matrix(files, "a", (COLUMNS, ROWS))
    with pytest.raises(ModelLoadError, match=r"'b' in .* is of type I8; served are BF16, F16, F32"):
        PlainFormat().matrix(files, "b", (ROWS, COLUMNS))
    with pytest.raises(ModelLoadError, match="'c' is missing from the checkpoint"):
        PlainFormat().matrix(files, "c", (ROWS, COLUMNS))
