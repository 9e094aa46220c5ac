"""Layouts of quantised matrices: the tensors that replace an unquantised one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.matrices.references import MatrixRef

Headers = Mapping[str, StoredTensor]
Shape = tuple[int, ...]

FLOATS = ("F32", "F16", "BF16")
EXPONENT_DTYPES = ("U8", "F8_E8M0")
ONE: Final[tuple[Shape, ...]] = ((), (1,))  # shapes of a tensor with one number
EXPONENTS: Final = "exponents"  # the role of scales that are powers of two, a byte each
STEPS: Final = "steps"  # the role of 8-bit scales with a common factor
# Roles of 8-bit scales -> their dtypes.
SMALL_SCALES: Final[Mapping[str, str]] = {EXPONENTS: "F8_E8M0", STEPS: "F8_E4M3"}
_LONGEST = 1 << 20  # inputs, outputs, or groups of inputs: far beyond any model


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a quantised matrix, with the headers that it may have."""

    role: str  # its name in the format
    name: str
    dtypes: tuple[str, ...]  # one of them
    shapes: tuple[Shape, ...]  # one of them
    needed: bool = True


class MatrixLayout(Protocol):
    """How one checkpoint stores matrices: a format, and its parameters from config.json."""

    @property
    def name(self) -> str:
        """The format's name for `--quantize`."""

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        """Return the tensors of a matrix; empty if it is not quantised.

        Raises ModelLoadError for a matrix that the format cannot store.
        """


def read_count(
    where: str, quant_config: Mapping[str, Any], name: str, default: int | None = None
) -> int:
    """Return an integer from a description; raises ModelLoadError if it is none."""
    value = quant_config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= _LONGEST:
        raise ModelLoadError(f"{where} says {name} {value!r}, which is no whole number in range.")
    return value


def split_name(name: str) -> str | None:
    """Return a matrix's name without ".weight", None for another kind of name."""
    return name.removesuffix(".weight") if name.endswith(".weight") else None


def count_words(count: int, bits: int) -> int:
    """Return the number of 32-bit words that the codes fill."""
    return math.ceil(count * bits / 32)


def count_groups(matrix: MatrixRef, group: int) -> int:
    """Return how many groups of inputs a matrix has; `group` -1: one for all."""
    return 1 if group == -1 else math.ceil(matrix.columns / group)


def check_bits(where: str, form: str, bits: int, group: int, read: Sequence[int]) -> None:
    """Raise ModelLoadError for codes of other bits than those in `read`, and for empty groups.

    `form`: the format's name in a description, "GPTQ".
    """
    if bits not in read or group == 0:
        raise ModelLoadError(
            f"{where} says {form} with {bits} bits in groups of {group}; read are "
            f"{', '.join(map(str, read))} bits, in groups of one input or more."
        )


def check_groups(matrix: MatrixRef, form: str, group: int, *, by_outputs: bool = True) -> None:
    """Raise ModelLoadError unless a matrix consists of whole groups of inputs, and its rows are
    outputs if `by_outputs`.
    """
    if matrix.columns % group or (by_outputs and matrix.transposed):
        raise ModelLoadError(
            f"{matrix.name!r} of {matrix.rows} x {matrix.columns} cannot be stored as {form}: "
            f"inputs come by {group}, and rows are outputs."
        )


def check_parts(parts: Sequence[Part], tensors: Headers, folder: object) -> None:
    """Raise ModelLoadError unless a matrix's parts exist, with allowed dtypes and shapes."""
    for part in parts:
        tensor = tensors.get(part.name)
        if tensor is None:
            if part.needed:
                raise ModelLoadError(
                    f"Tensor {part.name!r} is missing from the checkpoint {folder}: a part of a "
                    "quantised matrix whose other parts are there."
                )
            continue
        if tensor.dtype not in part.dtypes:
            raise ModelLoadError(
                f"Tensor {part.name!r} in {tensor.file} is of type {tensor.dtype}, but a part of "
                f"this kind is {' or '.join(part.dtypes)}."
            )
        if tensor.shape not in part.shapes:
            asked = " or ".join(str(list(shape)) for shape in part.shapes)
            raise ModelLoadError(
                f"Tensor {part.name!r} in {tensor.file} has shape {list(tensor.shape)}, but "
                f"config.json asks for {asked}."
            )


def read_shape(where: str, quant_config: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """Return the two sizes of a block from a description, or None if it has none.

    Raises ModelLoadError for anything else.
    """
    value = quant_config.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ModelLoadError(f"{where} says {name} {value!r}, which is no pair of sizes.")
    rows, columns = (read_count(where, {name: size}, name) for size in value)
    if min(rows, columns) < 1:
        raise ModelLoadError(f"{where} says {name} {value!r}, which is no pair of sizes.")
    return rows, columns


def scale_shapes(matrix: MatrixRef, block: tuple[int, int]) -> tuple[Shape, ...]:
    """Return the shapes that the scales of a matrix may have; `block`: outputs and inputs that
    share a scale, -1: all.
    """
    rows = 1 if block[0] == -1 else math.ceil(matrix.rows / block[0])
    columns = count_groups(matrix, block[1])
    flat: tuple[Shape, ...] = ((rows,),) if columns == 1 else ()
    scalar: tuple[Shape, ...] = ((),) if rows == columns == 1 else ()
    return ((rows, columns), *flat, *scalar)


def find_block(matrix: MatrixRef, scales: Shape) -> tuple[int, int]:
    """Return how many outputs and inputs share a scale, by the shape of the scales, in a format
    whose matrices consist of whole blocks; all, if they do not.
    """
    rows, columns = (*scales, 1, 1)[:2]
    return (
        matrix.rows // rows if rows and matrix.rows % rows == 0 else -1,
        matrix.columns // columns if columns and matrix.columns % columns == 0 else -1,
    )
