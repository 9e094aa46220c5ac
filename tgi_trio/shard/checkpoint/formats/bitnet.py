"""BitNet: ternary weights, in the file or made of trained ones, with one number for a matrix."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.quantised.bitnet_layout import CODES_OF_BYTE, TRAINED, BitnetLayout
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.affine import AffineSource
from tgi_trio.shard.checkpoint.formats.plain import view_numbers
from tgi_trio.shard.checkpoint.formats.quantised_matrix import QuantisedSource, check_finite
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32

_ZERO: Final = 1  # the code of 0
_LEAST_MEAN: Final = 1e-5
_AT_ONCE: Final = 1 << 20  # trained weights that are float32 at once while their mean is found


class TernarySource(AffineSource):
    """An `AffineSource` of codes 0, 1 and 2. Inputs can be cut anywhere: all share the scale."""

    def __init__(self, shape: tuple[int, int], weight: RawTensor) -> None:
        super().__init__(shape, (weight,), bits=2, group=shape[1])
        self.step = 1
        self._weight = weight

    @property
    @abstractmethod
    def scale(self) -> np.float32:
        """The weight that code 2 stands for."""

    def scales(self, rows: slice) -> Floats:
        return np.full((rows.stop - rows.start, 1), self.scale, np.float32)

    def zeros(self, rows: slice) -> NDArray[np.uint8]:
        return np.full((rows.stop - rows.start, 1), _ZERO, np.uint8)


class StoredSource(TernarySource):
    """Weights that are ternary in the file, with their scale."""

    def __init__(
        self, layout: BitnetLayout, shape: tuple[int, int], parts: Mapping[str, RawTensor]
    ) -> None:
        """Raises ModelLoadError for a scale that is no finite number."""
        super().__init__(shape, parts["codes"])
        scale = to_float32(view_numbers(parts["scales"])).reshape(1)
        with np.errstate(divide="ignore"):
            scale = np.float32(1) / scale if layout.divides else scale
        self._scale = np.float32(check_finite(parts["scales"], scale)[0])

    @property
    def scale(self) -> np.float32:
        return self._scale


class PackedTernarySource(StoredSource):
    """Bytes [outputs / 4, inputs]: the lowest bits are those of the first quarter of outputs."""

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        outputs, each = np.arange(rows.start, rows.stop), self.shape[0] // CODES_OF_BYTE
        packed = self._weight.data.view(np.uint8).reshape(each, -1)[outputs % each, columns]
        shifts = (2 * (outputs // each)).astype(np.uint8)
        return np.asarray(packed >> shifts[:, None] & np.uint8(3), np.uint8)


class UnpackedSource(StoredSource):
    """Plain numbers [outputs, inputs] that are -1, 0 or 1."""

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        values = to_float32(view_numbers(self._weight)[rows, columns])
        codes = np.clip(values, -1, 1).astype(np.int8)
        if not np.array_equal(codes, values):
            raise ModelLoadError(
                f"Tensor {self._weight.name!r} in {self._weight.file.path} has a weight beside a "
                "scale that is none of -1, 0 and 1."
            )
        return (codes + np.int8(_ZERO)).view(np.uint8)


class TrainedSource(TernarySource):
    """Trained weights: each is divided by the mean of all magnitudes, and rounded to -1, 0 or 1."""

    @cached_property
    def _inverse(self) -> np.float32:
        """One over the mean of all magnitudes; raises ModelLoadError if one is not finite."""
        total = sum(float(np.abs(part).sum(dtype=np.float64)) for part in self._pieces())
        if not np.isfinite(total):
            raise ModelLoadError(
                f"Tensor {self._weight.name!r} in {self._weight.file.path} has a weight that is "
                "infinite or not a number."
            )
        mean = total / max(1, self.shape[0] * self.shape[1])
        return np.float32(1) / np.float32(max(mean, _LEAST_MEAN))

    @property
    def scale(self) -> np.float32:
        return np.float32(1) / self._inverse

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        values = to_float32(view_numbers(self._weight)[rows, columns])
        with np.errstate(over="ignore", invalid="ignore"):
            whole = np.clip(np.rint(values * self._inverse), -1, 1)
        return np.asarray(whole + _ZERO, np.uint8)

    def _pieces(self) -> Iterator[Floats]:
        values = view_numbers(self._weight)
        step = max(1, _AT_ONCE // max(1, self.shape[1]))
        for begin in range(0, len(values), step):
            yield to_float32(values[begin : begin + step])


def open_bitnet(
    layout: BitnetLayout, shape: tuple[int, int], parts: Mapping[str, RawTensor]
) -> QuantisedSource:
    """Return a matrix of the form that its tensors show."""
    if TRAINED in parts:
        return TrainedSource(shape, parts[TRAINED])
    kind = PackedTernarySource if parts["codes"].dtype == "U8" else UnpackedSource
    return kind(layout, shape, parts)
