"""A quantised matrix that can be cut like any other: common to all formats of several tensors."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.numbers import Floats

Array = NDArray[Any]

# Weights that are dequantised at once, so that their codes and scales stay in the cache.
_AT_ONCE = 256 << 10


class QuantisedSource(ABC):
    """A whole quantised matrix [outputs, inputs] in its files, of which rectangles are read.

    All methods raise ModelLoadError for impossible numbers.
    """

    coding: str  # see `StoredMatrix`
    bits: int
    group: int  # inputs that share a scale
    step: int  # inputs can be cut at its multiples: of groups, and of what is packed together
    together: int = 32  # outputs by which it is read, so that words and blocks are seldom split

    def __init__(self, shape: tuple[int, int], tensors: Sequence[RawTensor]) -> None:
        """`tensors`: its tensors, the codes first."""
        self.shape = shape
        self.tensors = tensors
        self._left = shape[0] * shape[1]  # weights that have not been released
        self._lock = threading.Lock()

    def coding_of(self, outputs: range, inputs: range) -> str:
        """Return the coding of a rectangle, see `StoredMatrix`."""
        return self.coding

    @abstractmethod
    def dequantise(self, rows: slice, columns: slice) -> Floats:
        """Return float32 of a rectangle; `columns` begins at a multiple of `step`, and ends at one
        or at the end of the matrix.
        """

    @abstractmethod
    def planes(self, rows: slice, columns: slice) -> Mapping[str, Array]:
        """Return the stored numbers of such a rectangle."""

    def release(self, rows: range, columns: range) -> None:
        """Note that a rectangle has been read for the last time.

        A rectangle's parts of the tensors are not contiguous, so the tensors are released with the
        last.
        """
        with self._lock:
            self._left -= len(rows) * len(columns)
            is_read = self._left == 0
        if is_read:
            for tensor in self.tensors:
                tensor.file.release(tensor.first, tensor.end)


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A `StoredMatrix`: a rectangle of a quantised matrix.

    Inputs may be cut anywhere: inputs that share words or scales with them are dequantised as well,
    and dropped.
    """

    source: QuantisedSource
    outputs: range
    inputs: range

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.outputs), len(self.inputs)

    @property
    def coding(self) -> str:
        return self.source.coding_of(self.outputs, self.inputs)

    @property
    def bits(self) -> int:
        return self.source.bits

    @property
    def group(self) -> int:
        return self.source.group

    def rows(self, part: slice) -> QuantisedMatrix:
        return QuantisedMatrix(self.source, self.outputs[part], self.inputs)

    def columns(self, part: slice) -> QuantisedMatrix:
        return QuantisedMatrix(self.source, self.outputs, self.inputs[part])

    def dequantised(self) -> Array:
        """Return float32; raises ModelLoadError as its source does, and for non-finite weights."""
        step, (first, end) = self.source.step, (self.inputs.start, self.inputs.stop)
        begin = first // step * step
        whole = min(-(-end // step) * step, self.source.shape[1])
        values = np.empty(self.shape, np.float32)
        width = max(1, whole - begin)
        count = -(-_AT_ONCE // width // self.source.together) * self.source.together
        for done in range(0, len(values), count):
            rows = self.outputs[done : done + count]
            with np.errstate(over="ignore", invalid="ignore"):
                part = self.source.dequantise(slice(rows.start, rows.stop), slice(begin, whole))
            if not np.isfinite(part).all():
                codes = self.source.tensors[0]
                raise ModelLoadError(
                    f"Tensor {codes.name!r} in {codes.file.path} stands for a weight that is "
                    "infinite or not a number."
                )
            values[done : done + count] = part[:, first - begin : end - begin]
        return values

    def planes(self) -> Mapping[str, Array]:
        """Return the stored numbers; raises ModelLoadError if the cut splits a group."""
        step, whole = self.source.step, self.source.shape[1]
        if self.inputs.start % step or (self.inputs.stop % step and self.inputs.stop != whole):
            name = self.source.tensors[0].name
            raise ModelLoadError(f"Inputs {self.inputs} of {name!r} split a group of {step}.")
        return self.source.planes(self._rows, slice(self.inputs.start, self.inputs.stop))

    @property
    def _rows(self) -> slice:
        return slice(self.outputs.start, self.outputs.stop)

    def place(self) -> tuple[Path, int]:
        codes, count = self.source.tensors[0], self.source.shape[0]
        size = codes.end - codes.first
        return codes.file.path, codes.first + size * self.outputs.start // count

    def release(self) -> None:
        self.source.release(self.outputs, self.inputs)


def check_finite(tensor: RawTensor, values: Floats) -> Floats:
    """Return scales of a tensor; raises ModelLoadError for one that is not finite."""
    if not np.isfinite(values).all():
        raise ModelLoadError(
            f"Tensor {tensor.name!r} in {tensor.file.path} holds a scale that is infinite or not a "
            "number."
        )
    return values
