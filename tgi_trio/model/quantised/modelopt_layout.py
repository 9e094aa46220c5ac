"""NVIDIA's ModelOpt: FP8, MXFP8 or NVFP4, which a matrix's tensors show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.fp8_layout import E4M3, Fp8Layout
from tgi_trio.model.quantised.layout import (
    EXPONENT_DTYPES,
    FLOATS,
    ONE,
    Headers,
    Part,
    split_name,
)
from tgi_trio.model.quantised.mxfp8_layout import mxfp8_parts
from tgi_trio.model.quantised.nvfp4_layout import nvfp4_parts

# Some of these also quantise activations, which is not done here. Models made with AWQ or SVD have
# further tensors.
_ALGORITHMS: Final = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8"),
    *("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MIXED_PRECISION"),
)


@dataclass(frozen=True, slots=True)
class ModeloptLayout:
    """weight = scale * 8-bit number, or factor * scale * 4-bit number."""

    name = "modelopt"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module, weight = split_name(matrix.name), tensors.get(matrix.name)
        if module is None or weight is None or weight.dtype not in ("U8", E4M3):
            return ()
        name = f"{module}.weight_scale"
        scales = tensors.get(name)
        inputs = Part("inputs", f"{module}.input_scale", FLOATS, ONE, needed=False)
        if weight.dtype == "U8":
            return (*nvfp4_parts(matrix, matrix.name, name, f"{name}_2"), inputs)
        if scales is not None and scales.dtype in EXPONENT_DTYPES:
            return (*mxfp8_parts(matrix, matrix.name, name), inputs)
        return Fp8Layout(None).parts(matrix, tensors)


def read_modelopt_layout(where: str, quant_config: Mapping[str, Any]) -> ModeloptLayout:
    """Return ModelOpt's layout; raises ModelLoadError for unsupported algorithms."""
    algorithm = quant_config.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        raise ModelLoadError(
            f"{where} says {algorithm} of ModelOpt's; read are {', '.join(_ALGORITHMS)}."
        )
    return ModeloptLayout()
