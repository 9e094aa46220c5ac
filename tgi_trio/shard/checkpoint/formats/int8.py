"""8-bit integers with a scale for every output, converted from any other format during loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix

# Weights that are float32 at once on their way to int8: they fit into the cache, and into memory
# that malloc keeps. Larger blocks would return to the system, and be faulted in again each time.
_ROUNDED_AT_ONCE = 24 << 10


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A `StoredMatrix` with the numbers of another, rounded to 8 bits.

    Its planes are computed on each request: "codes" int8 [out, in], "scales" float32 [out]. The
    other matrix is read in whole rows, on which the scales depend.
    """

    exact: StoredMatrix
    inputs: range | None = None  # the inputs of the other that it has; None: all

    @property
    def shape(self) -> tuple[int, int]:
        return self.exact.shape[0], len(self._inputs)

    @property
    def coding(self) -> str:
        return "int8"

    @property
    def bits(self) -> int:
        return 8

    @property
    def group(self) -> int:
        return self.exact.shape[1]

    def rows(self, part: slice) -> Int8Matrix:
        return Int8Matrix(self.exact.rows(part), self.inputs)

    def columns(self, part: slice) -> Int8Matrix:
        return Int8Matrix(self.exact, self._inputs[part])

    def dequantised(self) -> NDArray[Any]:
        """Return float32; raises ModelLoadError as `to_int8` does."""
        planes = self.planes()
        values: Floats = planes["codes"] * planes["scales"][:, None]
        return values

    def planes(self) -> Mapping[str, NDArray[Any]]:
        """Return codes and scales; raises ModelLoadError as `to_int8` does."""
        codes, scales = to_int8(self.exact.dequantised())
        return {"codes": codes[:, self._inputs.start : self._inputs.stop], "scales": scales}

    @property
    def _inputs(self) -> range:
        return range(self.exact.shape[1]) if self.inputs is None else self.inputs

    def place(self) -> tuple[Path, int]:
        return self.exact.place()

    def release(self) -> None:
        self.exact.release()


def to_int8(values: NDArray[Any]) -> tuple[NDArray[np.int8], Floats]:
    """Return int8 [out, in] and scales [out], whose products approximate `values` [out, in].

    The largest weight of a row becomes 127 or -127. Raises ModelLoadError for a weight that is not
    finite.
    """
    whole = np.empty(values.shape, np.int8)
    scales = np.empty(len(values), np.float32)
    step = max(1, _ROUNDED_AT_ONCE // values.shape[1])
    for begin in range(0, len(values), step):
        rows = slice(begin, begin + step)
        whole[rows], scales[rows] = _round_to_int8(to_float32(values[rows]))
    return whole, scales


def _round_to_int8(exact: Floats) -> tuple[Floats, Floats]:
    """Return integers [rows, in] and scales [rows], see `to_int8`."""
    largest = np.maximum(exact.max(axis=1), -exact.min(axis=1))
    if not np.isfinite(largest).all():
        raise ModelLoadError(
            "A weight of the checkpoint is infinite or not a number, so it has no 8-bit form; "
            "leave --quantize out to serve the weights as they are."
        )
    scales = np.maximum(largest / np.float32(127), np.finfo(np.float32).tiny)  # never 0
    whole = exact / scales[:, None]
    return np.rint(whole, out=whole), scales
