"""NVFP4: 4-bit numbers (e2m1) with an 8-bit scale (e4m3) per 16, and a factor for all.

Source: NVIDIA's ModelOpt and compressed-tensors, which write it; they differ in the names and in
whether the factor multiplies or divides.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.fp8_layout import E4M3
from tgi_trio.model.quantised.layout import FLOATS, ONE, STEPS, Part, check_groups

GROUP: Final = 16  # inputs that share a scale


def nvfp4_parts(matrix: MatrixRef, codes: str, scales: str, factor: str) -> tuple[Part, ...]:
    """Return a matrix's tensors by their names; raises ModelLoadError if it cannot be stored so."""
    check_groups(matrix, "NVFP4", GROUP)
    rows, columns = matrix.rows, matrix.columns
    return (
        Part("codes", codes, ("U8",), ((rows, columns // 2),)),
        Part(STEPS, scales, (E4M3,), ((rows, columns // GROUP),)),
        Part("scales", factor, FLOATS, ONE),
    )
