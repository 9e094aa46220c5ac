"""AMD's Quark: FP8, integers of 4 and 8 bits, and MXFP4, which a matrix's tensors show.

What shares a scale does as well: a matrix has one, one for each output, or [groups of inputs,
outputs]. Integers with scales of groups are stored [inputs, outputs].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.fp8_layout import E4M3
from tgi_trio.model.quantised.layout import (
    EXPONENT_DTYPES,
    FLOATS,
    ONE,
    Headers,
    Part,
    Shape,
    count_words,
    find_block,
    scale_shapes,
    split_name,
)
from tgi_trio.model.quantised.mxfp4_layout import mxfp4_parts
from tgi_trio.model.quantised.mxfp8_layout import mxfp8_parts

_NUMBERS: Final = ("fp8_e4m3", "int4", "uint4", "int8", "uint8", "fp4")
_PACKINGS: Final = ("reorder", "order")


@dataclass(frozen=True, slots=True)
class QuarkLayout:
    """weight = scale * (code - zero), or scale * number."""

    signed: bool  # whether codes of 4 bits are
    reordered: bool  # whether eight of them are in AWQ's order in a word, or one after the other

    name = "quark"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module, codes = split_name(matrix.name), tensors.get(matrix.name)
        if module is None or codes is None or codes.dtype not in (E4M3, "I32", "I8", "U8"):
            return ()
        if matrix.transposed:
            raise ModelLoadError(
                f"{matrix.name!r} is stored [inputs, outputs], as Quark is not known to do."
            )
        name = f"{module}.weight_scale"
        scales = tensors.get(name)
        if scales is None:
            return (Part("scales", name, FLOATS, ()),)  # missing
        if codes.dtype == "U8" and codes.shape == (matrix.rows, matrix.columns // 2):
            parts = mxfp4_parts(matrix, matrix.name, name)
        elif codes.dtype == E4M3 and scales.dtype in EXPONENT_DTYPES:
            parts = mxfp8_parts(matrix, matrix.name, name)
        elif codes.dtype == E4M3:
            shapes = scale_shapes(matrix, find_block(matrix, scales.shape))
            parts = (
                Part("codes", matrix.name, (E4M3,), ((matrix.rows, matrix.columns),)),
                Part("scales", name, FLOATS, shapes),
            )
        else:
            parts = _integers(matrix, module, codes.dtype, scales.shape)
        return (*parts, *_activations(module))


def _integers(matrix: MatrixRef, module: str, dtype: str, scales: Shape) -> tuple[Part, ...]:
    """Return the tensors of codes in words (I32) or bytes."""

    def packed(count: int) -> int:
        return count_words(count, 4) if dtype == "I32" else count

    rows, columns = matrix.rows, matrix.columns
    codes: Shape = (rows, packed(columns))
    shape, zeros = scales, scales
    if len(scales) == 2:
        groups = scales[0] if scales[0] and columns % scales[0] == 0 else 1
        codes, shape, zeros = (columns, packed(rows)), (groups, rows), (groups, packed(rows))
    elif scales:
        shape, zeros = (rows,), (packed(rows),)
    return (
        Part("codes", matrix.name, (dtype,), (codes,)),
        Part("scales", f"{module}.weight_scale", FLOATS, (shape,)),
        Part("zeros", f"{module}.weight_zero_point", (dtype,), (zeros,), needed=dtype != "I8"),
    )


def _activations(module: str) -> Iterator[Part]:
    """Yield what describes activations, which are not quantised that way here."""
    for role in ("input", "output"):
        yield Part(f"{role}s", f"{module}.{role}_scale", FLOATS, ONE, needed=False)
        zeros = f"{module}.{role}_zero_point"
        yield Part(f"{role} zeros", zeros, ("I8", "U8", "I32"), ONE, needed=False)


def read_quark_layout(where: str, quant_config: Mapping[str, Any]) -> QuarkLayout:
    """Return the layout from Quark's description; raises ModelLoadError for other numbers."""
    export = quant_config.get("export")
    export = export if isinstance(export, dict) else {}
    packing, form = export.get("pack_method", "reorder"), export.get("weight_format")
    if form not in (None, "real_quantized") or packing not in _PACKINGS:
        raise ModelLoadError(
            f"{where} says that weights are {form} in the order {packing!r}; read are those that "
            f"were exported as real_quantized, in the orders {', '.join(_PACKINGS)}."
        )
    found = set(_read_numbers(where, quant_config))
    if not found <= {*_NUMBERS} or {"int4", "uint4"} <= found:
        raise ModelLoadError(
            f"{where} says that weights are of the types {', '.join(sorted(found))}; read are "
            f"{', '.join(_NUMBERS)}, and of int4 and uint4 one."
        )
    return QuarkLayout("uint4" not in found, packing == "reorder")


def _read_numbers(where: str, quant_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types of the weights in all configs: of the model, of layers and their types."""
    configs = [quant_config.get("global_quant_config")]
    for key in ("layer_quant_config", "layer_type_quant_config"):
        more = quant_config.get(key)
        configs += more.values() if isinstance(more, dict) else []
    for config in configs:
        weight = config.get("weight") if isinstance(config, dict) else None
        if isinstance(weight, list) and len(weight) == 1:
            weight = weight[0]
        if isinstance(weight, list):
            raise ModelLoadError(
                f"{where} says that weights were quantised in {len(weight)} steps, as none are "
                "read: quantise the model in one."
            )
        if isinstance(weight, dict):
            yield str(weight.get("dtype"))
