"""Tensors of GGUF files: blocks of weights along the inputs, with a type for each tensor.

The types are in `gguf_blocks.py` and `gguf_k_blocks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import Change
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.gguf.block_types import BY_NAME, BlockType
from tgi_trio.model.quantised.gguf_layout import KEYS, VALUES, halves_fit
from tgi_trio.model.scales import are_finite
from tgi_trio.shard.checkpoint.container import Container, RawTensor, find_tensor
from tgi_trio.shard.checkpoint.formats.gguf_blocks import BLOCKS, Dequantise
from tgi_trio.shard.checkpoint.formats.gguf_k_blocks import K_BLOCKS
from tgi_trio.shard.checkpoint.formats.gguf_ternary_blocks import TERNARY_BLOCKS
from tgi_trio.shard.checkpoint.formats.joined_heads import JoinedHeads
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix, number_type
from tgi_trio.shard.checkpoint.gguf_files import GgufFiles
from tgi_trio.shard.checkpoint.mapped_file import MappedFile
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix

FUNCTIONS: Final[dict[str, Dequantise]] = BLOCKS | K_BLOCKS | TERNARY_BLOCKS
# Weights that are dequantised at once, so that intermediate results stay in the cache.
_AT_ONCE: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class GgufMatrix:
    """A `StoredMatrix` of blocks. Its only plane is "blocks" uint8 [out, blocks of a row, bytes].

    Inputs may be cut anywhere, since whole blocks are dequantised; but a cut through a block has no
    planes.
    """

    kind: BlockType
    blocks: NDArray[np.uint8]  # [rows of the file, blocks of a row, bytes of a block]
    file: MappedFile
    inputs: range  # the inputs in these blocks
    order: NDArray[np.intp] | None = None  # the file's row of each output; None: the same order

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.blocks if self.order is None else self.order), len(self.inputs)

    @property
    def coding(self) -> str:
        return self.kind.name

    @property
    def bits(self) -> int:
        return int(self.kind.name.lstrip("IMXFPTQ")[0])

    @property
    def group(self) -> int:
        """Inputs of a block, whose parts share a scale, or a scale of scales."""
        return self.kind.weights

    def rows(self, part: slice) -> GgufMatrix:
        if self.order is None:
            return replace(self, blocks=self.blocks[part])
        return replace(self, order=self.order[part])

    def columns(self, part: slice) -> GgufMatrix:
        size, inputs = self.kind.weights, self.inputs[part]
        first = inputs.start // size
        return replace(
            self,
            blocks=self.blocks[:, first : -(-inputs.stop // size)],
            inputs=range(inputs.start - first * size, inputs.stop - first * size),
        )

    def dequantised(self) -> Floats:
        """Return float32; raises ModelLoadError for a scale that is not finite."""
        values = np.empty(self.shape, np.float32)
        whole = self.blocks.shape[1] * self.kind.weights
        step = max(1, _AT_ONCE // whole)
        for begin in range(0, len(values), step):
            part = slice(begin, begin + step)
            blocks = self.blocks[part if self.order is None else self.order[part]]
            flat = np.ascontiguousarray(blocks).reshape(-1, self.kind.bytes)
            if not are_finite(flat, self.kind.name):
                raise ModelLoadError(
                    f"{self.file.path} holds a scale that is infinite or not a number."
                )
            exact = FUNCTIONS[self.kind.name](flat).reshape(-1, whole)
            values[part] = exact[:, self.inputs.start : self.inputs.stop]
        return values

    def planes(self) -> Mapping[str, NDArray[Any]]:
        """Return the blocks; raises ModelLoadError if the inputs are cut through a block."""
        if len(self.inputs) != self.blocks.shape[1] * self.kind.weights:
            raise ModelLoadError(
                f"A matrix in {self.file.path} is cut through its blocks of {self.kind.weights} "
                f"weights ({self.kind.name}), which have no parts."
            )
        return {"blocks": self.blocks if self.order is None else self.blocks[self.order]}

    def place(self) -> tuple[Path, int]:
        return self.file.path, self.file.offset(self._touched())

    def release(self) -> None:
        """Release the matrix if it is one byte range; otherwise the range contains others."""
        touched = self._touched()
        whole = self.order is None or len(touched) == len(self.order)
        if whole and touched.flags.forc:
            first = self.file.offset(touched)
            self.file.release(first, first + touched.nbytes)

    def _touched(self) -> NDArray[np.uint8]:
        """Return the file's rows from the first to the last that the matrix contains."""
        if self.order is None or not len(self.order):
            return self.blocks
        return self.blocks[self.order.min() : self.order.max() + 1]


class GgufFormat:
    """The `WeightFormat` of GGUF files."""

    name = "GGUF"

    def claims(self, config: ModelConfig, container: Container) -> bool:
        return isinstance(container, GgufFiles)

    def matrix(
        self, container: Container, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> StoredMatrix:
        """Return a matrix, see `WeightFormat`; llama.cpp stores all as [outputs, inputs]."""
        module = name.removesuffix(".weight")
        if f"{module}.{KEYS}" in container.names:
            return _join(container, module, shape)
        tensor = find_tensor(container, name, shape[::-1] if transposed else shape)
        if transposed and not (tensor.change and tensor.change.transposed):
            raise ModelLoadError(f"Tensor {name!r} in {tensor.file.path} is not turned around.")
        return _open(tensor, shape)


def _join(container: Container, module: str, shape: tuple[int, int]) -> JoinedHeads:
    """Return a matrix from its halves; raises ModelLoadError if they do not fit."""
    keys, values = (container.tensor(f"{module}.{half}") for half in (KEYS, VALUES))
    if not halves_fit(keys.shape, values.shape, shape):
        raise ModelLoadError(
            f"Tensors {keys.name!r} and {values.name!r} in {keys.file.path} make no matrix of "
            f"{shape[0]} x {shape[1]}."
        )
    return JoinedHeads(
        keys=_open(keys, (math.prod(keys.shape[:2]), keys.shape[2])),
        values=_open(values, (math.prod(values.shape[:2]), values.shape[2])),
        heads=keys.shape[0],
        outputs=range(shape[0]),
        inputs=range(shape[1]),
    )


def read_numbers(tensor: RawTensor) -> Floats:
    """Return all numbers of a tensor as float32 of its shape, and release it.

    Raises ModelLoadError for a scale that is not finite.
    """
    kind = BY_NAME.get(tensor.dtype)
    if kind is None:
        raise ModelLoadError(
            f"Tensor {tensor.name!r} in {tensor.file.path} is of the type {tensor.dtype}, which "
            "has no weights."
        )
    content = tensor.take()
    if kind.plain:
        return to_float32(content.view(number_type(tensor))).reshape(tensor.shape)
    width = tensor.shape[-1]
    blocks = content.reshape(-1, width // kind.weights, kind.bytes)
    matrix = GgufMatrix(kind, blocks, tensor.file, range(width))
    return matrix.dequantised().reshape(tensor.shape)


def _open(tensor: RawTensor, shape: tuple[int, int]) -> GgufMatrix | PlainMatrix:
    """Return a tensor as a matrix [outputs, inputs]."""
    order = row_order(tensor.change, shape[0])
    kind = BY_NAME[tensor.dtype]
    if kind.plain:
        values = tensor.data.view(number_type(tensor)).reshape(shape)
        return PlainMatrix(values, tensor.file) if order is None else PlainMatrix(values[order])
    blocks = tensor.data.reshape(shape[0], shape[1] // kind.weights, kind.bytes)
    return GgufMatrix(kind, blocks, tensor.file, range(shape[1]), order)


def row_order(change: Change | None, rows: int) -> NDArray[np.intp] | None:
    """Return the file's row for each row of a tensor, or None: the same."""
    if change is not None and change.rotary_heads:
        numbers = np.arange(rows).reshape(change.rotary_heads, -1, 2)
        return np.ascontiguousarray(numbers.swapaxes(1, 2)).reshape(rows)
    if change is not None and change.key_heads:
        heads, each = change.key_heads, change.queries_each
        by_kind = np.arange(rows).reshape(heads * (each + 2), -1)
        queries, keys = by_kind[: heads * each], by_kind[heads * each :].reshape(2, heads, -1)
        parts = [queries.reshape(heads, -1), keys[0], keys[1]]
        return np.ascontiguousarray(np.concatenate(parts, axis=1)).reshape(rows)
    return None


def unchanged(values: Floats, change: Change | None) -> Floats:
    """Return a vector [size] with the converter's changes undone.

    Raises ModelLoadError for numbers that cannot result from such a change.
    """
    order = row_order(change, len(values))
    if order is not None:
        values = values[order]
    if change is not None and change.plus_one:
        values = values - np.float32(1)
    if change is not None and change.exponential:
        if not (values < 0).all():
            raise ModelLoadError("a rate of decay in the GGUF file is not below 0: it is damaged")
        values = np.log(-values)
    return values
