"""The expansion of latents to keys and values, from the two tensors that some files have of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tgi_trio.shard.checkpoint.numbers import Floats, to_float32
from tgi_trio.shard.checkpoint.stored_matrix import PlainNumbers, StoredMatrix


@dataclass(frozen=True, slots=True)
class JoinedHeads(PlainNumbers):
    """A `StoredMatrix` of numbers [heads * (key + value), latent], joined on request.

    Per head, rows of its key come before those of its value. In the file the halves are separate,
    and keys are transposed: [heads * latent, key], and [heads * value, latent].
    """

    keys: StoredMatrix
    values: StoredMatrix
    heads: int
    outputs: range
    inputs: range

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.outputs), len(self.inputs)

    def rows(self, part: slice) -> JoinedHeads:
        return replace(self, outputs=self.outputs[part])

    def columns(self, part: slice) -> JoinedHeads:
        return replace(self, inputs=self.inputs[part])

    def dequantised(self) -> Floats:
        """Dequantise whole heads as float32; return the requested part."""
        latent = self.values.shape[1]
        each = (self.keys.shape[0] * self.keys.shape[1]) // (self.heads * latent)
        size = each + self.values.shape[0] // self.heads
        first, end = self.outputs.start // size, -(-self.outputs.stop // size)
        keys = self._read(self.keys, first, end).swapaxes(1, 2)
        joined = np.concatenate([keys, self._read(self.values, first, end)], axis=1)
        rows = slice(self.outputs.start - first * size, self.outputs.stop - first * size)
        columns = slice(self.inputs.start, self.inputs.stop)
        return np.ascontiguousarray(joined.reshape(-1, latent)[rows, columns])

    def place(self) -> tuple[Path, int]:
        return self.keys.place()

    def release(self) -> None:
        """Do nothing: parts of the halves share pages, and they are small."""

    def _read(self, half: StoredMatrix, first: int, end: int) -> Floats:
        """Return some heads of a half, [heads, rows, columns]."""
        each = half.shape[0] // self.heads
        part = half.rows(slice(first * each, end * each))
        return to_float32(part.dequantised()).reshape(end - first, each, -1)
