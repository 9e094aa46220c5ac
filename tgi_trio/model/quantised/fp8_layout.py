"""FP8: 8-bit floating-point weights with a scale for the tensor, each output, or each block.

DeepSeek V4's scales are powers of two, and its experts' weights are MXFP4 under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.layout import (
    EXPONENT_DTYPES,
    EXPONENTS,
    FLOATS,
    ONE,
    Headers,
    Part,
    read_shape,
    scale_shapes,
    split_name,
)
from tgi_trio.model.quantised.mxfp4_layout import packed_mxfp4_parts

E4M3 = "F8_E4M3"
_PAIRS = ("I8", "U8")  # of bytes with two 4-bit numbers


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """weight = scale * 8-bit number (e4m3), or, with a scale for 32 inputs, 4-bit number (e2m1)."""

    # outputs and inputs that share a scale; None: one for all, or one per output
    block: tuple[int, int] | None

    name = "fp8"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module, weight = split_name(matrix.name), tensors.get(matrix.name)
        if module is None or weight is None or weight.dtype not in (E4M3, *_PAIRS):
            return ()
        if matrix.transposed:
            raise ModelLoadError(
                f"{matrix.name!r} is stored [inputs, outputs], as FP8 is not known to be."
            )
        name = f"{module}.weight_scale{'_inv' if self.block else ''}"
        if weight.dtype in _PAIRS:
            return packed_mxfp4_parts(matrix, matrix.name, name)
        blocks = (self.block,) if self.block else ((-1, -1), (1, -1))
        shapes = tuple(shape for block in blocks for shape in scale_shapes(matrix, block))
        scales = Part("scales", name, FLOATS, shapes)
        if name in tensors and tensors[name].dtype in EXPONENT_DTYPES:
            scales = Part(EXPONENTS, name, EXPONENT_DTYPES, shapes)
        return (
            Part("codes", matrix.name, (E4M3,), ((matrix.rows, matrix.columns),)),
            scales,
            # Of activations, which are not quantised that way here; the second is FBGEMM's.
            Part("inputs", f"{module}.input_scale", FLOATS, ONE, needed=False),
            Part("bound", f"{module}.input_scale_ub", FLOATS, ONE, needed=False),
        )


def read_fp8_layout(where: str, quant_config: Mapping[str, Any]) -> Fp8Layout:
    """Return the layout from FP8's description; raises ModelLoadError for unsupported variants."""
    form = quant_config.get("fmt") or "e4m3"
    if form != "e4m3":
        raise ModelLoadError(f"{where} says that FP8 is in the form {form!r}; e4m3 alone is read.")
    return Fp8Layout(read_shape(where, quant_config, "weight_block_size"))
