"""References to matrices in a checkpoint, and how ranks split them.

A role (`AttentionRefs.qkv`, `MlpRefs.down`, ..., see `matrices/roles.py`) is a `LinearRef`: stacked
pieces of the checkpoint's matrices. A loader takes its `cuts`, which are plain slices of rows and
columns. They are the same kind of thing whether the checkpoint has three matrices or one, grouped
by head or not, stored [out, in] or [in, out], and whichever part a rank has. `matrices/decoder.py`
derives them from a decoder's spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tgi_trio.model.specs.decoder import NormKind

# What ranks split, see `split.py`; "whole": every rank has all of it.
Split = Literal["whole", "heads", "kv_heads", "mlp", "channels", "groups", "outputs", "vocabulary"]


@dataclass(frozen=True, slots=True)
class MatrixRef:
    """A matrix [rows, columns] of a checkpoint: outputs and inputs of a linear layer."""

    name: str  # of its tensor, in an unquantised checkpoint
    rows: int
    columns: int
    bias: str = ""  # name of a tensor [rows]; "": no bias
    transposed: bool = False  # stored [columns, rows], like GPT-2's Conv1D


@dataclass(frozen=True, slots=True)
class Units:
    """Rows or columns of a matrix, in units of `size` that stay together on a rank."""

    split: Split
    starts: Sequence[int]  # the first row or column of each unit
    size: int = 1
    as_they_lie: bool = False  # a rank's units are taken in the order of their starts
    # For units in one of several matrices that are split as one: the number of units before them,
    # and of all. None: these are all.
    within: tuple[int, int] | None = None

    def spans(self, mine: slice) -> list[slice]:
        """Return the given units in order, as few slices as possible."""
        starts = self.starts[mine]
        if self.as_they_lie:
            starts = sorted(starts)
        if not starts:
            return []
        if isinstance(starts, range) and starts.step == self.size:  # sometimes thousands
            return [slice(starts.start, starts.start + len(starts) * self.size)]
        spans: list[slice] = []
        for start in starts:
            first = spans.pop().start if spans and spans[-1].stop == start else start
            spans.append(slice(first, start + self.size))
        return spans


Share = Callable[[Units], slice]  # which of some units a rank has


@dataclass(frozen=True, slots=True)
class LinearPiece:
    """The outputs of one kind in a matrix."""

    matrix: MatrixRef
    outputs: Units
    inputs: Units


@dataclass(frozen=True, slots=True)
class Submatrix:
    """A rectangle of a matrix, or several side by side."""

    matrix: MatrixRef
    rows: slice
    columns: tuple[slice, ...]

    @property
    def width(self) -> int:
        """The number of columns."""
        return sum(len(range(self.matrix.columns)[span]) for span in self.columns)


@dataclass(frozen=True, slots=True)
class LinearRef:
    """y = x W^T + b, where W is `pieces`, stacked."""

    pieces: tuple[LinearPiece, ...]

    @property
    def partial(self) -> bool:
        """Whether the ranks' results are partial sums; only one rank adds the bias."""
        return any(piece.inputs.split != "whole" for piece in self.pieces)

    @property
    def biased(self) -> bool:
        return any(piece.matrix.bias for piece in self.pieces)

    def cuts(self, share: Share) -> Iterator[Submatrix]:
        """Yield the parts of W from top to bottom; all have the same columns."""
        for piece in self.pieces:
            columns = tuple(piece.inputs.spans(share(piece.inputs)))
            for rows in piece.outputs.spans(share(piece.outputs)):
                yield Submatrix(piece.matrix, rows, columns)


@dataclass(frozen=True, slots=True)
class NormRef:
    """A norm over `size` features; "" for a weight or a bias that it does not have.

    Of heads that have weights of their own, these are [heads, size], or "{}" in the name stands for
    the number of the head.
    """

    weight: str
    bias: str
    size: int
    eps: float
    kind: NormKind | None = None  # None: the model's
    heads: Units | None = None  # heads that have weights of their own

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of every tensor."""
        shape: tuple[int, ...] = (self.size,)
        if self.heads is not None and "{}" in self.weight:
            yield from ((self.weight.format(i), shape) for i in range(len(self.heads.starts)))
            return
        if self.heads is not None:
            shape = len(self.heads.starts), self.size
        yield from ((name, shape) for name in (self.weight, self.bias) if name)


@dataclass(frozen=True, slots=True)
class VectorRef:
    """A tensor [size] that is not a bias."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A small unquantised tensor that is not a matrix of a linear layer."""

    name: str
    shape: tuple[int, ...]
    units: Units  # how ranks split one of its dimensions
    axis: int = 0  # that dimension
    integers: bool = False


def every_unit(units: Units) -> slice:
    """Return all units: the share of a single rank."""
    return slice(0, len(units.starts))


def whole_units(count: int) -> Units:
    """Return `count` rows or columns that every rank has."""
    return Units("whole", (0,), count)


def run_of(split: Split, count: int, size: int = 1, *, first: int = 0) -> Units:
    """Return `count` adjacent units."""
    return Units(split, range(first, first + count * size, size), size)


def whole_linear(matrix: MatrixRef) -> LinearRef:
    """Return a linear that every rank has."""
    return LinearRef((LinearPiece(matrix, whole_units(matrix.rows), whole_units(matrix.columns)),))


def split_outputs(matrix: MatrixRef, split: Split, size: int = 1) -> LinearRef:
    """Return a linear whose outputs are split over ranks, `size` at a time."""
    units = run_of(split, matrix.rows // size, size)
    return LinearRef((LinearPiece(matrix, units, whole_units(matrix.columns)),))


def stack_matrices(matrices: Sequence[MatrixRef], outputs: Units) -> LinearRef:
    """Return stacked matrices of one shape, whose outputs are all split alike."""
    return LinearRef(
        tuple(LinearPiece(matrix, outputs, whole_units(matrix.columns)) for matrix in matrices)
    )


def split_inputs(matrix: MatrixRef, units: Units) -> LinearRef:
    """Return a linear whose inputs are split over ranks."""
    return LinearRef((LinearPiece(matrix, whole_units(matrix.rows), units),))
