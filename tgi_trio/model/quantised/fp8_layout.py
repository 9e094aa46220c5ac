"""FP8: 8-bit floating-point weights with a scale for the tensor, each output, or each block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices import MatrixRef
from tgi_trio.model.quantised.layout import (
    FLOATS,
    ONE,
    Headers,
    Part,
    read_shape,
    scale_shapes,
    split_name,
)

E4M3 = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """weight = scale * 8-bit number (e4m3)."""

    # outputs and inputs that share a scale; None: one for all, or one per output
    block: tuple[int, int] | None

    name = "fp8"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module, weight = split_name(matrix.name), tensors.get(matrix.name)
        if module is None or weight is None or weight.dtype != E4M3:
            return ()
        if matrix.transposed:
            raise ModelLoadError(
                f"{matrix.name!r} is stored [inputs, outputs], as FP8 is not known to be."
            )
        name = f"{module}.weight_scale{'_inv' if self.block else ''}"
        blocks = (self.block,) if self.block else ((-1, -1), (1, -1))
        shapes = tuple(shape for block in blocks for shape in scale_shapes(matrix, block))
        return (
            Part("codes", matrix.name, (E4M3,), ((matrix.rows, matrix.columns),)),
            Part("scales", name, FLOATS, shapes),
            # Of activations, which are not quantised that way here; the second is FBGEMM's.
            Part("inputs", f"{module}.input_scale", FLOATS, ONE, needed=False),
            Part("bound", f"{module}.input_scale_ub", FLOATS, ONE, needed=False),
        )


def read_fp8_layout(where: str, said: Mapping[str, Any]) -> Fp8Layout:
    """Return the layout from FP8's description; raises ModelLoadError for unsupported variants."""
    form = said.get("fmt") or "e4m3"
    if form != "e4m3":
        raise ModelLoadError(f"{where} says that FP8 is in the form {form!r}; e4m3 alone is read.")
    return Fp8Layout(read_shape(where, said, "weight_block_size"))
