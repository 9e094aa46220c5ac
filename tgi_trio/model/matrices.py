"""How a matrix of a model lies in its checkpoint, and how ranks split it.

A role (`AttentionRefs.qkv`, `MlpRefs.down`, ..., see `matrix_roles.py`) is a `LinearRef`: pieces of
the checkpoint's matrices, one below the other. A loader takes its `cuts`, which are plain slices of
rows and columns, whether the checkpoint has three matrices or one, grouped by head or not, stored
[out, in] or [in, out], and whichever part a rank has of it. `decoder_matrices.py` says of a decoder
which these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

# What ranks divide among themselves, see `split.py`; "whole": every rank has all of it.
Split = Literal["whole", "heads", "kv_heads", "mlp", "channels", "groups", "vocabulary"]


@dataclass(frozen=True, slots=True)
class MatrixRef:
    """A matrix [rows, columns] of a checkpoint: outputs and inputs of a linear layer."""

    name: str  # of its tensor, in a checkpoint of plain numbers
    rows: int
    columns: int
    bias: str = ""  # name of a tensor [rows]; "": none
    transposed: bool = False  # stored [columns, rows], as GPT-2's Conv1D does


@dataclass(frozen=True, slots=True)
class Units:
    """Rows or columns of a matrix, in units of `size` that stay together on a rank."""

    split: Split
    starts: Sequence[int]  # the first row or column of each unit
    size: int = 1
    as_they_lie: bool = False  # a rank's units are in the order of their starts
    # Where they are in a run of several matrices that is divided as one: how many are before them,
    # and in all of it. None: they are all.
    within: tuple[int, int] | None = None

    def spans(self, mine: slice) -> list[slice]:
        """Return the units `mine` in order, as few slices as there can be."""
        starts = self.starts[mine]
        if self.as_they_lie:
            starts = sorted(starts)
        if not starts:
            return []
        if isinstance(starts, range) and starts.step == self.size:  # thousands, at times
            return [slice(starts.start, starts.start + len(starts) * self.size)]
        spans: list[slice] = []
        for start in starts:
            first = spans.pop().start if spans and spans[-1].stop == start else start
            spans.append(slice(first, start + self.size))
        return spans


Share = Callable[[Units], slice]  # which of some units to take


@dataclass(frozen=True, slots=True)
class LinearPiece:
    """Outputs of one matrix that are of one kind."""

    matrix: MatrixRef
    outputs: Units
    inputs: Units


@dataclass(frozen=True, slots=True)
class Cut:
    """A rectangle of a matrix, or several beside each other."""

    matrix: MatrixRef
    rows: slice
    columns: tuple[slice, ...]

    @property
    def width(self) -> int:
        """How many columns there are."""
        return sum(len(range(self.matrix.columns)[span]) for span in self.columns)


@dataclass(frozen=True, slots=True)
class LinearRef:
    """y = x W^T + b; W is made of `pieces`, one below the other."""

    pieces: tuple[LinearPiece, ...]

    @property
    def partial(self) -> bool:
        """Whether the ranks' results are to be added up; one of them alone adds the bias."""
        return any(piece.inputs.split != "whole" for piece in self.pieces)

    @property
    def biased(self) -> bool:
        return any(piece.matrix.bias for piece in self.pieces)

    def cuts(self, share: Share) -> Iterator[Cut]:
        """Yield what W is made of, from top to bottom; the columns of all are the same."""
        for piece in self.pieces:
            columns = tuple(piece.inputs.spans(share(piece.inputs)))
            for rows in piece.outputs.spans(share(piece.outputs)):
                yield Cut(piece.matrix, rows, columns)


@dataclass(frozen=True, slots=True)
class NormRef:
    """A norm over `size` features; "" for a weight or a bias that it does not have."""

    weight: str
    bias: str
    size: int
    eps: float


@dataclass(frozen=True, slots=True)
class VectorRef:
    """A tensor [size] that is no bias."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A small tensor of plain numbers that nothing is multiplied with as a matrix."""

    name: str
    shape: tuple[int, ...]
    units: Units  # how ranks divide one of its dimensions
    axis: int = 0  # which


def every_unit(units: Units) -> slice:
    """Return all of them: the share of a rank that is alone."""
    return slice(0, len(units.starts))


def whole_units(count: int) -> Units:
    """Return `count` rows or columns that every rank has."""
    return Units("whole", (0,), count)


def run_of(split: Split, count: int, size: int = 1, *, first: int = 0) -> Units:
    """Return `count` units, one behind the other."""
    return Units(split, range(first, first + count * size, size), size)


def whole_linear(matrix: MatrixRef) -> LinearRef:
    """Return a linear that every rank has."""
    return LinearRef((LinearPiece(matrix, whole_units(matrix.rows), whole_units(matrix.columns)),))


def split_outputs(matrix: MatrixRef, split: Split, size: int = 1) -> LinearRef:
    """Return a linear whose outputs ranks divide among themselves, `size` at a time."""
    units = run_of(split, matrix.rows // size, size)
    return LinearRef((LinearPiece(matrix, units, whole_units(matrix.columns)),))


def stack_matrices(matrices: Sequence[MatrixRef], outputs: Units) -> LinearRef:
    """Return matrices of one shape below each other, the outputs of each shared alike."""
    return LinearRef(
        tuple(LinearPiece(matrix, outputs, whole_units(matrix.columns)) for matrix in matrices)
    )


def split_inputs(matrix: MatrixRef, units: Units) -> LinearRef:
    """Return a linear whose inputs ranks divide among themselves."""
    return LinearRef((LinearPiece(matrix, whole_units(matrix.rows), units),))
