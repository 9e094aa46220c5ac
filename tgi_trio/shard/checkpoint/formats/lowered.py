"""weight = scale * code - low: codes with two real numbers for each group of inputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.formats.quantised_matrix import Array, QuantisedSource
from tgi_trio.shard.checkpoint.numbers import Floats


class LoweredSource(QuantisedSource):
    """A `QuantisedSource` of such codes; groups are contiguous and of one size.

    Subclasses set `bits`, `group` and `step`, and read codes, scales and lows.
    """

    coding = "lowered"

    @abstractmethod
    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        """Return integers [rows, columns]."""

    @abstractmethod
    def scales(self, rows: slice, groups: slice) -> Floats:
        """Return finite float32 [rows, groups]."""

    @abstractmethod
    def lows(self, rows: slice, groups: slice) -> Floats:
        """Return finite float32 [rows, groups]."""

    def dequantise(self, rows: slice, columns: slice) -> Floats:
        values, groups = self.codes(rows, columns).astype(np.float32), self._groups(columns)
        runs = values.reshape(len(values), groups.stop - groups.start, self.group)
        runs *= self.scales(rows, groups)[..., None]
        runs -= self.lows(rows, groups)[..., None]
        return values

    def planes(self, rows: slice, columns: slice) -> Mapping[str, Array]:
        """Return "codes" [rows, columns], "scales" and "lows" [rows, groups]."""
        groups = self._groups(columns)
        return {
            "codes": self.codes(rows, columns),
            "scales": self.scales(rows, groups),
            "lows": self.lows(rows, groups),
        }

    def _groups(self, columns: slice) -> slice:
        return slice(columns.start // self.group, columns.stop // self.group)
