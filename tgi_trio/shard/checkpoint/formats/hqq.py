"""HQQ: a matrix's rows of codes in as many equal parts as a word has codes, one above another."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.hqq_layout import ZEROS, Grouping, check_grouping
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.lowered import LoweredSource
from tgi_trio.shard.checkpoint.formats.plain import view_numbers
from tgi_trio.shard.checkpoint.formats.quantised_matrix import (
    Array,
    QuantisedSource,
    check_finite,
)
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32


class _Packed:
    """The codes of a matrix, flat: a word's highest bits belong to the first part."""

    def __init__(self, own: Grouping, shape: tuple[int, int], codes: RawTensor) -> None:
        self._own, self._width = own, shape[1]
        self._words: NDArray[np.uint8] | NDArray[np.int32] = codes.data
        if own.bits == 3:
            self._words = codes.data.view("<i4")

    def read(self, rows: slice) -> NDArray[np.uint8]:
        """Return codes [rows, inputs]."""
        own, size = self._own, len(self._words)  # a part has a code in every word
        first, end = rows.start * self._width, rows.stop * self._width
        codes = np.empty(end - first, np.uint8)
        for part in range(first // size, -(-end // size)):
            begin, stop = max(first, part * size), min(end, (part + 1) * size)
            words = self._words[begin - part * size : stop - part * size]
            shifted = words >> (own.bits * (own.together - 1 - part))
            codes[begin - first : stop - first] = shifted & ((1 << own.bits) - 1)
        return codes.reshape(-1, self._width)


class HqqSource(LoweredSource):
    """Groups of neighbours in a row; scales and zero points [outputs * groups, 1]."""

    def __init__(
        self, own: Grouping, shape: tuple[int, int], parts: Mapping[str, RawTensor]
    ) -> None:
        super().__init__(shape, tuple(parts.values()))
        self._packed = _Packed(own, shape, parts["codes"])
        self._scales, self._zeros = parts["scales"], parts[ZEROS]
        self.bits, self.group, self.step = own.bits, own.group, own.group

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        return self._packed.read(rows)[:, columns]

    def scales(self, rows: slice, groups: slice) -> Floats:
        return self._read(self._scales, rows, groups)

    def lows(self, rows: slice, groups: slice) -> Floats:
        lows = self._read(self._zeros, rows, groups) * self.scales(rows, groups)
        return check_finite(self._zeros, lows)

    def _read(self, tensor: RawTensor, rows: slice, groups: slice) -> Floats:
        numbers = view_numbers(tensor).reshape(self.shape[0], -1)[rows, groups]
        return check_finite(tensor, to_float32(numbers))


class HqqAcrossSource(QuantisedSource):
    """Groups across outputs: every `count`-th weight of the flat matrix shares one of `count`
    scales.
    """

    coding = "lowered across outputs"
    step = 1

    def __init__(
        self, own: Grouping, shape: tuple[int, int], parts: Mapping[str, RawTensor]
    ) -> None:
        super().__init__(shape, tuple(parts.values()))
        self._packed = _Packed(own, shape, parts["codes"])
        self._scales, self._zeros = parts["scales"], parts[ZEROS]
        self.bits, self.group = own.bits, own.group

    def dequantise(self, rows: slice, columns: slice) -> Floats:
        planes = self.planes(rows, columns)
        values: Floats = planes["codes"].astype(np.float32)
        values *= planes["scales"]
        values -= planes["lows"]
        return values

    def planes(self, rows: slice, columns: slice) -> Mapping[str, Array]:
        """Return "codes", and of each weight its scale and low, in "scales" and "lows"."""
        width = self.shape[1]
        places = np.arange(rows.start, rows.stop)[:, None] * width
        places = places + np.arange(columns.start, columns.stop)
        scales = self._read(self._scales, places)
        lows = check_finite(self._zeros, scales * self._read(self._zeros, places))
        return {"codes": self._packed.read(rows)[:, columns], "scales": scales, "lows": lows}

    def _read(self, tensor: RawTensor, places: NDArray[np.intp]) -> Floats:
        numbers = view_numbers(tensor).reshape(-1)
        return check_finite(tensor, to_float32(numbers[places % len(numbers)]))


def open_hqq(shape: tuple[int, int], parts: Mapping[str, RawTensor]) -> QuantisedSource:
    """Return a matrix; raises ModelLoadError for one whose own shape is another."""
    module = parts["codes"].name.removesuffix(".W_q")
    stated = parts.get("shape")
    if stated is not None and tuple(stated.data.view("<i8")) != shape:
        raise ModelLoadError(
            f"Tensor {stated.name!r} in {stated.file.path} says that its matrix has shape "
            f"{stated.data.view('<i8').tolist()}, but config.json asks for {list(shape)}."
        )
    bits, group, axis = (
        int(parts[name].data.view("<i4")[0]) for name in ("nbits", "group_size", "axis")
    )
    own = check_grouping(module, MatrixRef(f"{module}.weight", *shape), bits, group, axis)
    return (HqqSource if own.axis == 1 else HqqAcrossSource)(own, shape, parts)
