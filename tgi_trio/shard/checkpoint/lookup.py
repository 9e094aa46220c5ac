"""The weights of a model by name, for every backend, independent of their files and formats."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_tensors import gguf_files, read_tensors
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.formats import TABLE_DTYPES
from tgi_trio.model.matrices.references import LinearRef, Share, TensorRef
from tgi_trio.shard.checkpoint.container import Container, find_tensor
from tgi_trio.shard.checkpoint.formats.choose import choose_format
from tgi_trio.shard.checkpoint.formats.gguf import unchanged
from tgi_trio.shard.checkpoint.formats.plain import number_type
from tgi_trio.shard.checkpoint.gguf_files import GgufFiles
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32
from tgi_trio.shard.checkpoint.rounding.encoding import Encoding, round_matrix
from tgi_trio.shard.checkpoint.safetensors_files import SafetensorsFiles
from tgi_trio.shard.checkpoint.side_by_side import join_columns
from tgi_trio.shard.checkpoint.stored_matrix import Stack, StoredMatrix, WeightFormat


class Weights(Protocol):
    """Where a loader finds weights: a checkpoint, or artificial ones."""

    def matrix(
        self, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> StoredMatrix: ...

    def vector(self, name: str, size: int) -> Floats: ...

    def array(self, name: str, shape: tuple[int, ...]) -> Floats: ...

    @property
    def encoding(self) -> Encoding | None:
        """The format to which matrices of linear layers are rounded; None: they stay as stored."""


class Checkpoint:
    """The `Weights` of a model's folder. As a context manager, it closes its files."""

    def __init__(
        self,
        container: Container,
        weight_format: WeightFormat,
        base: str = "",
        encoding: Encoding | None = None,
    ) -> None:
        """`base`: prefix that may be missing in all names, as in checkpoints of a bare model."""
        self._encoding = encoding
        self._container = container
        self._format = weight_format
        self._base = "" if any(name.startswith(base) for name in container.names) else base

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._container.close()

    @property
    def encoding(self) -> Encoding | None:
        return self._encoding

    def __contains__(self, name: str) -> bool:
        return name.removeprefix(self._base) in self._container.names

    def matrix(
        self, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> StoredMatrix:
        """Return a matrix [outputs, inputs]; raises ModelLoadError as `WeightFormat.matrix`."""
        name = name.removeprefix(self._base)
        return self._format.matrix(self._container, name, shape, transposed=transposed)

    def vector(self, name: str, size: int) -> Floats:
        """Return a copy of a tensor [size]; raises ModelLoadError as `find_tensor` does."""
        return self.array(name, (size,))

    def array(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Return a copy of a small tensor [*shape]; raises ModelLoadError as `vector` does."""
        tensor = find_tensor(self._container, name.removeprefix(self._base), shape)
        kind = number_type(tensor)
        return unchanged(to_float32(tensor.take().view(kind)), tensor.change).reshape(shape)

    def table(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Return a copy of a tensor of whole numbers; raises ModelLoadError as `vector` does."""
        tensor = find_tensor(self._container, name.removeprefix(self._base), shape)
        return tensor.take().view(TABLE_DTYPES[tensor.dtype]).reshape(shape).astype(np.int64)

    def number(self, names: Iterable[str]) -> float | None:
        """Return the only number in the first of these tensors that exists; None: there is none.

        Raises ModelLoadError for a tensor with more, and for a number that is not above 0.
        """
        name = next((each for each in names if each in self), None)
        if name is None:
            return None
        tensor = self._container.tensor(name.removeprefix(self._base))
        values = to_float32(tensor.take().view(number_type(tensor)))
        if values.size != 1 or not 0 < values[0] < np.inf:
            raise ModelLoadError(f"Tensor {name!r} in {tensor.file.path} is no scale above 0.")
        return float(values[0])


def open_checkpoint(
    config: ModelConfig,
    base: str = "",
    *,
    given_back: Collection[Path] = (),
    kept: Collection[str] = (),
    writable: bool = False,
    encoding: Encoding | None = None,
) -> Checkpoint:
    """Open the weights of a model's folder, `base` and `encoding` as for `Checkpoint`.

    The rest as for `MappedFiles`. Raises ModelLoadError for a folder without weights, for damaged
    ones, and for an unsupported format.
    """
    names = {*kept, *(name.removeprefix(base) for name in kept)}  # with the base and without
    files: Container
    if gguf_files(config.folder):
        files = GgufFiles(config, given_back=given_back, kept=names, writable=writable)
    else:
        tensors = read_tensors(config)
        files = SafetensorsFiles(
            config.folder, tensors, given_back=given_back, kept=names, writable=writable
        )
    return Checkpoint(files, choose_format(config, files), base, encoding)


def read_linear(weights: Weights, linear: LinearRef, share: Share) -> Stack:
    """Return the matrix of a linear layer, or this rank's `share` of it.

    It is rounded if `weights` have an encoding: as a whole matrix, so that every share has the same
    scales.
    """
    return _read(weights, linear, share, weights.encoding)


def read_table(weights: Weights, linear: LinearRef, share: Share) -> Stack:
    """Return a matrix whose rows are looked up, without rounding."""
    return _read(weights, linear, share, None)


def _read(weights: Weights, linear: LinearRef, share: Share, encoding: Encoding | None) -> Stack:
    parts = []
    for cut in linear.cuts(share):
        name, shape = cut.matrix.name, (cut.matrix.rows, cut.matrix.columns)
        whole = weights.matrix(name, shape, transposed=cut.matrix.transposed)
        rows = round_matrix(whole, encoding).rows(cut.rows)
        parts.append(join_columns([rows.columns(span) for span in cut.columns]))
    return Stack(parts)


def read_tensor(weights: Weights, ref: TensorRef, share: Share) -> Floats:
    """Return a small tensor, or this rank's `share` of it."""
    whole = np.moveaxis(weights.array(ref.name, ref.shape), ref.axis, 0)
    parts = [whole[rows] for rows in ref.units.spans(share(ref.units))]
    return np.moveaxis(np.concatenate(parts), 0, ref.axis)


def read_bias(weights: Weights, linear: LinearRef, share: Share) -> Floats | None:
    """Return a linear layer's bias [outputs], None if no piece has one; other pieces get 0."""
    if not linear.biased:
        return None
    parts = []
    for cut in linear.cuts(share):
        matrix, rows = cut.matrix, cut.rows
        if matrix.bias:
            parts.append(weights.vector(matrix.bias, matrix.rows)[rows])
        else:
            parts.append(np.zeros(rows.stop - rows.start, np.float32))
    return np.concatenate(parts)
