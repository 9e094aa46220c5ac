"""EXL2: groups of inputs have bits of their own, and inputs are stored by importance.

Codes are widened to those of one width, which changes no weight. Source: exllamav2's packing
(adaptivegptq.py, pack_tensor.cu) and reading (q_matrix.cu, qdq_util.cuh).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.quantised.exl2_layout import BITS, TOGETHER
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.affine import AffineSource
from tgi_trio.shard.checkpoint.formats.bits import unpack, view_words
from tgi_trio.shard.checkpoint.formats.plain import view_numbers
from tgi_trio.shard.checkpoint.formats.quantised_matrix import check_finite
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32

_WIDEST: Final = 8  # bits of the codes of a matrix that has some of more than 4
_STEPS: Final = 16  # of scales: they are squares of 1/16 to 16/16, times the group's largest


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of inputs that are stored one after another."""

    bits: int
    words: slice  # of an output
    inputs: int


class Exl2Source(AffineSource):
    """Codes uint32 [words, outputs], steps of scales [groups, outputs in words].

    Groups are divided into ones of equal size, which share their scale.
    """

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, RawTensor]) -> None:
        """`parts` as `Exl2Layout` has them. Raises ModelLoadError if they contradict each other."""
        self._words = view_words(parts["codes"])
        self._stored = _read_groups(parts["groups"], len(self._words), shape[1])
        self._places = _read_places(parts["places"])
        self._scale_codes, self._largest = parts["scale codes"], parts["largest"]
        *whole, last = (group.inputs for group in self._stored)
        size = math.gcd(*whole) if whole else last
        self._repeats = np.array([-(-group.inputs // size) for group in self._stored])
        starts = np.cumsum(self._repeats) - self._repeats
        order = np.concatenate(
            [
                start + np.arange(group.inputs) // size
                for start, group in zip(starts.tolist(), self._stored, strict=True)
            ]
        )
        most = max(group.bits for group in self._stored)
        super().__init__(
            shape,
            tuple(parts.values()),
            bits=most if most <= 4 else _WIDEST,
            group=size,
            order=order[self._places],
        )

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        words = np.ascontiguousarray(self._words[:, rows].T)
        stored = []
        for group in self._stored:
            codes = unpack(np.ascontiguousarray(words[:, group.words]), group.bits)
            stored.append(codes + np.uint8(self._zero - (1 << (group.bits - 1))))
        return np.concatenate(stored, axis=1)[:, self._places[columns]]

    def scales(self, rows: slice) -> Floats:
        words = view_words(self._scale_codes)
        first = rows.start // 8
        steps = unpack(np.ascontiguousarray(words[:, first : -(-rows.stop // 8)]), 4)
        steps = steps[:, rows.start - 8 * first : rows.stop - 8 * first].T
        largest = check_finite(self._largest, to_float32(view_numbers(self._largest)))
        scales = np.square((steps.astype(np.float32) + 1) / _STEPS) * largest
        return np.repeat(scales, self._repeats, axis=1)

    def zeros(self, rows: slice) -> NDArray[np.uint8]:
        return np.full((rows.stop - rows.start, self._repeats.sum()), self._zero, np.uint8)

    @property
    def _zero(self) -> int:
        return 1 << (self.bits - 1)


def _read_groups(tensor: RawTensor, words: int, inputs: int) -> list[_Group]:
    """Return the groups from pairs of their bits and their first word."""
    pairs = tensor.data.view(np.uint16).reshape(-1, 2).tolist()
    groups: list[_Group] = []
    for (bits, first), end in zip(pairs, [*(at for _, at in pairs[1:]), words], strict=True):
        count = (end - first) * 32 // bits if bits in BITS and end > first else 0
        begins = groups[-1].words.stop if groups else 0
        if not count or count % TOGETHER or first != begins:
            raise ModelLoadError(
                f"Tensor {tensor.name!r} in {tensor.file.path} describes a group of {bits} bits "
                f"in words {first} to {end}; EXL2 has {', '.join(map(str, BITS))} bits, and "
                f"inputs by {TOGETHER}, in words from 0 to {words}."
            )
        groups.append(_Group(bits, slice(first, end), count))
    if sum(group.inputs for group in groups) != inputs:
        raise ModelLoadError(
            f"Tensor {tensor.name!r} in {tensor.file.path} describes groups of "
            f"{sum(group.inputs for group in groups)} inputs in all, of a matrix that has {inputs}."
        )
    return groups


def _read_places(tensor: RawTensor) -> NDArray[np.int64]:
    """Return where each input's codes are stored: a permutation [inputs]."""
    places = tensor.data.view(np.int32).astype(np.int64)
    if not np.array_equal(np.sort(places), np.arange(len(places))):
        raise ModelLoadError(
            f"Tensor {tensor.name!r} in {tensor.file.path} puts two inputs at one place, or one "
            "nowhere."
        )
    return places
