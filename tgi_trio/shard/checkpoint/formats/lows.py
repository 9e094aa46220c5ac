"""weight = scale * code - low: integers with a scale and a floating-point low for each group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from tgi_trio.shard.checkpoint.formats.affine import AffineSource
from tgi_trio.shard.checkpoint.formats.quantised_matrix import Array
from tgi_trio.shard.checkpoint.numbers import Floats


class LowSource(AffineSource):
    """An `AffineSource` of unsigned codes whose zero points are no integers."""

    coding = "affine with lows"

    @abstractmethod
    def lows(self, rows: slice) -> Floats:
        """Return finite float32 [rows, groups]."""

    def zeros(self, rows: slice) -> None:
        return None

    def dequantise(self, rows: slice, columns: slice) -> Floats:
        values = super().dequantise(rows, columns)
        values -= self.lows(rows)[:, self._groups(columns)]
        return values

    def planes(self, rows: slice, columns: slice) -> Mapping[str, Array]:
        """Return "codes" [rows, columns], "scales" and "lows" [rows, groups]."""
        mine = slice(columns.start // self.group, -(-columns.stop // self.group))
        return {**super().planes(rows, columns), "lows": self.lows(rows)[:, mine]}
