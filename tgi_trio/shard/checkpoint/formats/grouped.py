"""Codes in 32-bit words with scales [groups, outputs], as tools for GPUs store them."""

from __future__ import annotations

from collections.abc import Mapping

from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.affine import AffineSource, read_order
from tgi_trio.shard.checkpoint.formats.bits import view_words
from tgi_trio.shard.checkpoint.formats.plain import view_numbers
from tgi_trio.shard.checkpoint.formats.quantised_matrix import check_finite
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32


class GroupedSource(AffineSource):
    """An `AffineSource` of such tensors. Subclasses know the order of codes and zero points."""

    def __init__(
        self,
        shape: tuple[int, int],
        parts: Mapping[str, RawTensor],
        *,
        bits: int,
        group: int,
        packed: int = 1,
    ) -> None:
        """`group`: inputs that share a scale, -1: all. `packed`: inputs per word.

        `parts` has "codes", "scales", and "groups" if groups are not contiguous; raises
        ModelLoadError for an unknown group.
        """
        super().__init__(
            shape,
            tuple(parts.values()),
            bits=bits,
            group=shape[1] if group == -1 else group,
            order=read_order(parts.get("groups"), parts["scales"].shape[0]),
            packed=packed,
        )
        self._words = view_words(parts["codes"])
        self._scales = parts["scales"]

    def scales(self, rows: slice) -> Floats:
        scales = to_float32(view_numbers(self._scales)[:, rows])
        return check_finite(self._scales, scales).T
