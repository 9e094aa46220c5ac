"""Which tensors of a checkpoint are parts of quantised matrices, checked by their headers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.formats import are_plain, describe_plain, find_quantization_config
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.latent_halves import find_halves
from tgi_trio.model.quantised.layout import (
    FLOATS,
    SMALL_SCALES,
    Headers,
    MatrixLayout,
    Part,
    check_parts,
    split_name,
)

NO_COPIES: Final[Mapping[str, MatrixRef]] = {}
_LARGEST_BIAS = 8 << 20  # bytes


@dataclass(frozen=True, slots=True)
class StoredMatrices:
    """The quantised matrices of a checkpoint."""

    matrices: frozenset[str] = frozenset()  # by the names that they would have unquantised
    parts: frozenset[str] = frozenset()  # the names of their tensors
    codes: frozenset[str] = frozenset()  # of these, the codes, whatever their dtype
    # Of these, 8-bit scales -> their dtype.
    small_scales: Mapping[str, str] = field(default_factory=dict)


def check_stored(
    config: ModelConfig,
    layout: MatrixLayout | None,
    matrices: Iterable[MatrixRef],
    base: str,
    tensors: Headers,
    copies: Mapping[str, MatrixRef] = NO_COPIES,
) -> StoredMatrices:
    """Return the matrices that are stored in parts; raises ModelLoadError unless all parts fit.

    `layout` None: nothing is quantised. `base`: as for `Claims`. `copies`: of matrices, by the
    names of these, which nothing reads.
    """
    if any(name.startswith(base) for name in tensors):
        base = ""
    quantised, known, codes = set[str](), set[str](), set[str]()
    small_scales = dict[str, str]()
    for matrix in matrices:
        copy = copies.get(matrix.name)
        matrix = replace(matrix, name=matrix.name.removeprefix(base))
        parts = _parts(layout, matrix, tensors)
        if not parts:
            continue
        check_parts(parts, tensors, config.folder)
        quantised.add(matrix.name)
        known |= {part.name for part in parts}
        codes |= {part.name for part in parts if part.role == "codes"}
        small_scales |= {
            part.name: SMALL_SCALES[part.role] for part in parts if part.role in SMALL_SCALES
        }
        known |= set(_zero_biases(matrix, tensors))
        if copy is not None and layout is not None:
            known |= {part.name for part in layout.parts(copy, tensors)}
    found = find_quantization_config(config)
    if not quantised and found is not None and are_plain(tensors):
        raise ModelLoadError(
            f"{config.folder} holds no matrix in the format {found.name}, as {found.where} says."
            f"{describe_plain(found)}"
        )
    return StoredMatrices(frozenset(quantised), frozenset(known), frozenset(codes), small_scales)


def _parts(layout: MatrixLayout | None, matrix: MatrixRef, tensors: Headers) -> tuple[Part, ...]:
    """Return the tensors of a matrix; empty if it is one tensor that is not quantised."""
    halves = find_halves(matrix, tensors)
    parts: list[Part] = []
    for each in halves or (matrix,):
        own = layout.parts(each, tensors) if layout is not None else ()
        if halves and not own:
            own = (Part("numbers", each.name, FLOATS, ((each.rows, each.columns),)),)
        parts += own
    return tuple(parts)


def _zero_biases(matrix: MatrixRef, tensors: Headers) -> Iterator[str]:
    """Yield the bias beside a matrix for which the model has none, if it is all zeros.

    Older versions of AutoGPTQ write one for every matrix.
    """
    name = f"{split_name(matrix.name)}.bias"
    tensor = tensors.get(name)
    if matrix.bias or tensor is None or tensor.end - tensor.first > _LARGEST_BIAS:
        return
    with tensor.file.open("rb") as file:
        file.seek(tensor.first)
        if not any(file.read(tensor.end - tensor.first)):
            yield name
