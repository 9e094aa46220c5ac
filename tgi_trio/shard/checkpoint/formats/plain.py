"""Unquantised weights: float32, float16, bfloat16 and float64, a tensor per matrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.formats import find_quantization_config
from tgi_trio.shard.checkpoint.container import Container, RawTensor, find_tensor
from tgi_trio.shard.checkpoint.mapped_file import MappedFile
from tgi_trio.shard.checkpoint.numbers import to_float32
from tgi_trio.shard.checkpoint.stored_matrix import PlainNumbers

_TYPES: Final = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64}


@dataclass(frozen=True, slots=True)
class PlainMatrix(PlainNumbers):
    """A `StoredMatrix` of floating-point numbers, in a file or (None) only in memory."""

    values: NDArray[Any]
    file: MappedFile | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def bits(self) -> int:
        return 8 * self.values.itemsize

    def rows(self, part: slice) -> PlainMatrix:
        return PlainMatrix(self.values[part], self.file)

    def columns(self, part: slice) -> PlainMatrix:
        return PlainMatrix(self.values[:, part], self.file)

    def dequantised(self) -> NDArray[Any]:
        # Nothing is computed in float64, and nobody else need know it.
        wide = self.values.dtype == np.float64
        return to_float32(self.values) if wide else self.values

    def place(self) -> tuple[Path, int]:
        return (Path(), 0) if self.file is None else (self.file.path, self.file.offset(self.values))

    def release(self) -> None:
        """Release the matrix if it is one byte range; otherwise the range contains others."""
        if self.file is not None and self.values.flags.forc:
            first = self.file.offset(self.values)
            self.file.release(first, first + self.values.nbytes)


class PlainFormat:
    """The `WeightFormat` of unquantised weights."""

    name = "plain numbers"

    def claims(self, config: ModelConfig, container: Container) -> bool:
        return find_quantization_config(config) is None

    def matrix(
        self, container: Container, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> PlainMatrix:
        tensor = find_tensor(container, name, shape[::-1] if transposed else shape)
        values = view_numbers(tensor)
        return PlainMatrix(values.T if transposed else values, tensor.file)


def view_numbers(tensor: RawTensor) -> NDArray[Any]:
    """Return a tensor's numbers, as described in `numbers.py`, or float64: a view of its file.

    Raises ModelLoadError as `number_type` does.
    """
    return tensor.data.view(number_type(tensor)).reshape(tensor.shape)


def number_type(tensor: RawTensor) -> np.dtype[Any]:
    """Return the dtype of a tensor's numbers; raises ModelLoadError for an unsupported one."""
    if tensor.dtype not in _TYPES:
        raise ModelLoadError(
            f"Tensor {tensor.name!r} in {tensor.file.path} is of type {tensor.dtype}; served are "
            f"{', '.join(_TYPES)}."
        )
    return np.dtype(_TYPES[tensor.dtype])
