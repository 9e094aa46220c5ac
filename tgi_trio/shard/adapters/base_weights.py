"""What adapters need to know of their base: the norms of DoRA, and biases.

They are those of the weights as the checkpoint has them, dequantised if it is quantised. What the
server itself rounds (`--quantize`) the adapter was not trained on, and its norms hardly differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Final

import numpy as np

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.checkpoint.lookup import Checkpoint, open_checkpoint
from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16, to_float32
from tgi_trio.shard.machine.small_products import multiply_small

_ROUNDING: Final = 2.0**-7  # bfloat16's, of either number
_AT_ONCE: Final = 1 << 17  # numbers that are read between two rests: about 0.5 ms


class BaseWeights:
    """A base's checkpoint, opened when something of it is needed, and closed after the block."""

    def __init__(self, config: ModelConfig, spec: DecoderSpec) -> None:
        self._config = config
        self._spec = spec
        self._files = ExitStack()
        self._checkpoint: Checkpoint | None = None

    def __enter__(self) -> BaseWeights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._checkpoint = None
        self._files.close()

    def read_bias(self, matrix: MatrixRef) -> Floats:
        """Return a linear's bias [rows], zeros if it has none; raises ModelLoadError."""
        if not matrix.bias:
            return np.zeros(matrix.rows, np.float32)
        return self._open().vector(matrix.bias, matrix.rows)

    def read_row(self, matrix: MatrixRef, index: int) -> Floats:
        """Return a row [columns] of a matrix; raises ModelLoadError."""
        ((_, values),) = self._read(matrix, slice(index, index + 1), lambda: None)
        row: Floats = values[0].copy()
        return row

    def measure_rows(
        self, matrix: MatrixRef, rows: slice, a: Floats, b: Floats, rest: Callable[[], None]
    ) -> Floats:
        """Return the norms |W + B A| of some rows of a matrix, float32.

        `a` [r, inputs]; `b` [rows, r], scaled, of these rows alone. `rest` is called between short
        pieces of work. Raises ModelLoadError as the checkpoint does.
        """
        norms = np.empty(len(b), np.float32)
        for part, values in self._read(matrix, rows, rest):
            own = slice(part.start - rows.start, part.stop - rows.start)
            total = multiply_small(b[None, own], a[None])[0] + values
            norms[own] = np.sqrt(np.einsum("ij,ij->i", total, total))
        return norms

    def measure_columns(
        self, matrix: MatrixRef, a: Floats, b: Floats, rest: Callable[[], None]
    ) -> Floats:
        """Return the norms of the columns [columns] of W + A B^T, for an embedding W, float32.

        `a` [rows, r]; `b` [columns, r], scaled. `rest` as for `measure_rows`. Raises ModelLoadError
        as the checkpoint does.
        """
        squares = np.zeros(matrix.columns)
        turned = np.ascontiguousarray(b.T)
        for part, values in self._read(matrix, slice(0, matrix.rows), rest):
            total = multiply_small(a[None, part], turned[None])[0] + values
            squares += np.einsum("ij,ij->j", total, total)
        norms: Floats = np.sqrt(squares).astype(np.float32)
        return norms

    def is_copied(
        self,
        matrix: MatrixRef,
        rows: int,
        copy: Callable[[slice], Floats],
        rest: Callable[[], None],
    ) -> bool:
        """Return whether `copy`, which returns rows, is a copy of a matrix, but for rounding.

        It has the first `rows` of it. `rest` as for `measure_rows`. Raises ModelLoadError as the
        checkpoint does.
        """
        return all(
            np.allclose(copy(part), values, rtol=_ROUNDING, atol=1e-6)
            for part, values in self._read(matrix, slice(0, rows), rest)
        )

    def find_changes(
        self,
        matrix: MatrixRef,
        rows: int,
        copy: Callable[[slice], Floats],
        dtype: str,
        most: int,
        rest: Callable[[], None],
    ) -> list[int] | None:
        """Return the rows in which `copy`, which returns rows, differs from a matrix.

        It has the first `rows` of it. None: there are more than `most`. `dtype`: of the copy in its
        file, to which the matrix is rounded: what has been trained may differ in the last bit.
        `rest` as for `measure_rows`. Raises ModelLoadError as the checkpoint does.
        """
        found: list[int] = []
        for part, values in self._read(matrix, slice(0, rows), rest):
            if dtype in ("BF16", "F16"):
                narrow = to_bfloat16(values) if dtype == "BF16" else values.astype(np.float16)
                values = to_float32(narrow)
            changed = (copy(part) != values).any(axis=1)
            found += (part.start + np.flatnonzero(changed)).tolist()
            if len(found) > most:
                return None
        return found

    def _read(
        self, matrix: MatrixRef, rows: slice, rest: Callable[[], None]
    ) -> Iterator[tuple[slice, Floats]]:
        """Yield some of the rows of a matrix at a time, with their numbers."""
        shape = (matrix.rows, matrix.columns)
        stored = self._open().matrix(matrix.name, shape, transposed=matrix.transposed)
        each = max(1, _AT_ONCE // matrix.columns)
        for first in range(rows.start, rows.stop, each):
            rest()
            part = slice(first, min(first + each, rows.stop))
            own = stored.rows(part)
            yield part, to_float32(own.dequantised())
            own.release()

    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            opened = open_checkpoint(self._config, self._spec.names.base)
            self._checkpoint = self._files.enter_context(opened)
        return self._checkpoint
