"""An encoding, which rounds a matrix, and the `StoredMatrix` of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix

Array = NDArray[Any]
Planes = dict[str, Array]

# Weights that are rounded at once, so that intermediate results stay in the cache.
_AT_ONCE = 64 << 10


@dataclass(frozen=True, slots=True)
class Encoding:
    """A way to round rows of float32, and to decode the result."""

    coding: str  # the format's, as in `StoredMatrix`
    bits: int
    # The size of groups that share a scale, for a number of inputs; 0: it cannot encode them.
    group: Callable[[int], int]
    # Takes [rows, inputs] and the group; returns planes, each [rows, ...] with groups of inputs
    # along the second axis.
    encode: Callable[[Floats, int], Planes]
    # planes, including shared ones -> [rows, inputs]
    decode: Callable[[Mapping[str, Array]], Floats]
    shared: Mapping[str, Array] = field(default_factory=dict)  # planes that all rows share
    instead: Encoding | None = None  # used for inputs that it cannot encode


def find_encoding(encoding: Encoding | None, inputs: int) -> Encoding | None:
    """Return the encoding for matrices with so many inputs; None: they are not rounded."""
    while encoding is not None and not encoding.group(inputs):
        encoding = encoding.instead
    return encoding


def round_matrix(exact: StoredMatrix, encoding: Encoding | None) -> StoredMatrix:
    """Return a matrix, rounded if an encoding fits."""
    found = find_encoding(encoding, exact.shape[1])
    if found is None:
        return exact
    return RoundedMatrix(exact, found, found.group(exact.shape[1]), range(exact.shape[1]))


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """The numbers of another matrix, rounded on each request."""

    exact: StoredMatrix
    encoding: Encoding
    group: int
    inputs: range  # the inputs of the other that it has; scales may depend on all of them

    @property
    def shape(self) -> tuple[int, int]:
        return self.exact.shape[0], len(self.inputs)

    @property
    def bits(self) -> int:
        return self.encoding.bits

    @property
    def coding(self) -> str:
        return self.encoding.coding

    def rows(self, part: slice) -> RoundedMatrix:
        return replace(self, exact=self.exact.rows(part))

    def columns(self, part: slice) -> RoundedMatrix:
        inputs = self.inputs[part]
        if self._splits(inputs):
            return replace(self, inputs=inputs)
        exact = self.exact.columns(slice(inputs.start, inputs.stop))
        return replace(self, exact=exact, inputs=range(len(inputs)))

    def dequantised(self) -> Floats:
        """Return float32; raises ModelLoadError for a weight that is not finite."""
        values = np.empty(self.shape, np.float32)
        shared, mine = self.encoding.shared, slice(self.inputs.start, self.inputs.stop)
        for rows, planes in self._pieces():
            values[rows] = self.encoding.decode({**planes, **shared})[:, mine]
        return values

    def planes(self) -> Mapping[str, Array]:
        """Return the format's planes; raises ModelLoadError if the inputs split a group."""
        if self._splits(self.inputs):
            raise ModelLoadError(f"Inputs {self.inputs} split a group of {self.group}.")
        whole: Planes = {}
        for rows, planes in self._pieces():
            for name, plane in planes.items():
                # These are all inputs: other cuts with whole groups are of scales that need no
                # more.
                target = whole.setdefault(
                    name, np.empty((self.shape[0], *plane.shape[1:]), plane.dtype)
                )
                target[rows] = plane
        cut = slice(self.inputs.start, self.inputs.stop)
        return {name: _cut(p, cut, self._width) for name, p in whole.items()} | dict(
            self.encoding.shared
        )

    def place(self) -> tuple[Path, int]:
        return self.exact.place()

    def release(self) -> None:
        self.exact.release()

    @property
    def _width(self) -> int:
        return self.exact.shape[1]

    def _splits(self, inputs: range) -> bool:
        """Return whether a range of inputs splits a group."""
        return bool(inputs.start % self.group or inputs.stop % self.group)

    def _pieces(self) -> Iterator[tuple[slice, Planes]]:
        """Yield ranges of rows, and their planes with all inputs."""
        exact = self.exact.dequantised()
        step = max(1, _AT_ONCE // max(1, self._width))
        for begin in range(0, len(exact), step):
            rows = slice(begin, begin + step)
            values = to_float32(exact[rows])
            if not np.isfinite(values).all():
                raise ModelLoadError(
                    f"A weight in {self.place()[0]} is infinite or not a number, so it has no form "
                    f"of {self.bits} bits; leave --quantize out to serve the weights as they are."
                )
            yield rows, self.encoding.encode(values, self.group)


def _cut(plane: Array, inputs: slice, width: int) -> Array:
    """Return the part of a plane [rows, groups, ...] for some of `width` inputs."""
    each = width // plane.shape[1]
    return plane[:, inputs.start // each : -(-inputs.stop // each)]
