"""The weights of a model by name, for every backend: where they lie and how they are stored is
hidden here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_tensors import gguf_files, read_tensors
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.matrices import LinearRef, Share, TensorRef
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
    """Where a loader finds weights: a checkpoint, or made-up ones."""

    def matrix(
        self, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> StoredMatrix: ...

    def vector(self, name: str, size: int) -> Floats: ...

    def array(self, name: str, shape: tuple[int, ...]) -> Floats: ...

    @property
    def encoding(self) -> Encoding | None:
        """What the matrices of linear layers are rounded to; None: they stay as they are."""


class Checkpoint:
    """The `Weights` of a model's folder. A context manager: closes its files."""

    def __init__(
        self,
        container: Container,
        weight_format: WeightFormat,
        base: str = "",
        encoding: Encoding | None = None,
    ) -> None:
        """`base`: prefix that may be left out of every name, as checkpoints of a bare model do."""
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

    def number(self, names: Iterable[str]) -> float | None:
        """Return the only number of the first tensor that is there; None: none of them is.

        Raises ModelLoadError for a tensor of more, and for one that is not above 0.
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

    The rest as for `MappedFiles`. Raises ModelLoadError for a folder without weights, for
    damaged ones, and for a format that is not served.
    """
    names = {*kept, *(name.removeprefix(base) for name in kept)}  # whether the base is there or not
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
    """Return the matrix of a linear layer, as much of it as `share` says.

    Rounded where `weights` have an encoding: whole matrices are, so that any part has their scales.
    """
    return _read(weights, linear, share, weights.encoding)


def read_table(weights: Weights, linear: LinearRef, share: Share) -> Stack:
    """Return a matrix whose rows are looked up, as it is stored."""
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
    """Return a small tensor, as much of it as `share` says."""
    whole = np.moveaxis(weights.array(ref.name, ref.shape), ref.axis, 0)
    parts = [whole[rows] for rows in ref.units.spans(share(ref.units))]
    return np.moveaxis(np.concatenate(parts), 0, ref.axis)


def read_bias(weights: Weights, linear: LinearRef, share: Share) -> Floats | None:
    """Return the bias [outputs] of a linear layer, None where no piece has one; else 0 for it."""
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
