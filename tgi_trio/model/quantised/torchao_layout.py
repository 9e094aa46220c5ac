"""torchao: the tensors that its subclasses of a tensor consist of, side by side in safetensors.

A weight `q_proj.weight` is there as `q_proj._weight_qdata`, `q_proj._weight_scale` and others. Each
matrix may be stored in another form (`FqnToConfig`), which its tensors' dtypes and shapes show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.fp8_layout import E4M3
from tgi_trio.model.quantised.layout import (
    FLOATS,
    ONE,
    Headers,
    Part,
    Shape,
    find_block,
    scale_shapes,
)

TILED: Final = "scales and zeros"  # the role of both in one tensor, of matrices in tiles
TILE_OUTPUTS: Final = 8
TILE_INPUTS: Final = 128
_PADDED_INPUTS: Final = 1024  # inputs of matrices in tiles are padded to a multiple
# Forms that are not read, by the dtypes of their scales, and what helps.
_UNREAD: Final = {
    "F8_E8M0": "MX, which is read as llm-compressor, ModelOpt and Quark write it",
    "F8_E4M3": "NVFP4, which is read as llm-compressor and ModelOpt write it",
}


@dataclass(frozen=True, slots=True)
class TorchaoLayout:
    """weight = scale * (code - zero); of 4 bits, scale * (code - 8) + zero."""

    name = "torchao"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        names = torchao_names(matrix.name)
        codes, scales = tensors.get(f"{names}qdata"), tensors.get(f"{names}scale")
        if codes is None:
            return ()
        if matrix.transposed:
            raise ModelLoadError(
                f"{matrix.name!r} is stored [inputs, outputs], as torchao is not known to do."
            )
        if scales is not None and scales.dtype in _UNREAD:
            raise ModelLoadError(f"{matrix.name!r} is stored in {_UNREAD[scales.dtype]}.")
        if f"{names}act_pre_scale" in tensors:
            raise ModelLoadError(
                f"{matrix.name!r} is stored in AWQ's or SmoothQuant's form, whose inputs are "
                "multiplied first: AWQ's own files are read."
            )
        found = scales.shape if scales is not None else ()
        if len(codes.shape) == 4:
            return _tiles(matrix, names, tensors)
        if codes.shape == (matrix.rows, matrix.columns // 2):
            return _pairs(matrix, names, found)
        shapes = scale_shapes(matrix, find_block(matrix, found))
        inputs = (*ONE, (1, 1))
        return (
            Part("codes", f"{names}qdata", ("I8", E4M3), ((matrix.rows, matrix.columns),)),
            Part("scales", f"{names}scale", FLOATS, shapes),
            Part("zeros", f"{names}zero_point", ("I8",), shapes, needed=False),
            # Of activations, which are not quantised that way here.
            Part("inputs", f"{names}act_quant_scale", FLOATS, inputs, needed=False),
            Part("input zeros", f"{names}act_quant_zero_point", ("I8",), inputs, needed=False),
        )


def torchao_names(name: str) -> str:
    """Return what the names of a matrix's tensors begin with: "q_proj._weight_"."""
    module, _, own = name.rpartition(".")
    return f"{module}._{own}_"


def _pairs(matrix: MatrixRef, names: str, scales: Shape) -> tuple[Part, ...]:
    """Return the tensors of a matrix with two codes in a byte."""
    groups = scales[0] if scales else 1
    _check_groups(matrix, matrix.columns, groups)
    shapes = ((groups, matrix.rows),)
    return (
        Part("codes", f"{names}qdata", ("I8", "U8"), ((matrix.rows, matrix.columns // 2),)),
        Part("scales", f"{names}scale", FLOATS, shapes),
        Part("zeros", f"{names}zero_point", FLOATS, shapes),
    )


def _tiles(matrix: MatrixRef, names: str, tensors: Headers) -> tuple[Part, ...]:
    """Return the tensors of a matrix in the order of tinygemm's kernel."""
    tall = math.ceil(matrix.rows / TILE_OUTPUTS)
    columns = math.ceil(matrix.columns / _PADDED_INPUTS) * _PADDED_INPUTS
    both = tensors.get(f"{names}scale_and_zero")
    groups = both.shape[0] if both is not None and both.shape else 1
    _check_groups(matrix, columns, groups)
    tiles = (tall, columns // TILE_INPUTS, 32, 4)
    shapes = ((groups, tall * TILE_OUTPUTS, 2),)
    return (
        Part("codes", f"{names}qdata", ("I32",), (tiles,)),
        Part(TILED, f"{names}scale_and_zero", FLOATS, shapes),
    )


def _check_groups(matrix: MatrixRef, columns: int, groups: int) -> None:
    """Raise ModelLoadError unless a matrix's inputs are whole groups of 32, 64, 128 or 256."""
    size = columns // max(groups, 1)
    parted = groups > 1 and matrix.columns % size  # columns may be more, padded
    if size * groups != columns or size.bit_count() != 1 or parted:
        raise ModelLoadError(
            f"{matrix.name!r} of {columns} inputs has {groups} groups of them, but torchao's 4 "
            "bits come in groups of 32, 64, 128 or 256."
        )


def read_torchao_layout(where: str, quant_config: Mapping[str, Any]) -> TorchaoLayout:
    """Return the layout; raises ModelLoadError for tiles of AMD's kernels."""
    if any(value == 2 * TILE_OUTPUTS for value in _find(quant_config, "int4_tile_packed_ntile")):
        raise ModelLoadError(
            f"{where} says that 4 bits are in the order of AMD's kernels; read are those in tiles "
            "of 8 outputs, and plain ones (int4_packing_format)."
        )
    return TorchaoLayout()


def _find(quant_config: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key at any depth: configs of modules are inside others."""
    if isinstance(quant_config, dict):
        for name, value in quant_config.items():
            if name == key:
                yield value
            yield from _find(value, key)
