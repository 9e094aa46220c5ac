"""MXFP8 (OCP Microscaling Formats 1.0, 2023): FP8 with a power of two for every 32 inputs."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.fp8_layout import E4M3
from tgi_trio.model.quantised.layout import EXPONENT_DTYPES, EXPONENTS, Part, check_groups

GROUP: Final = 32  # inputs that share a scale


def mxfp8_parts(matrix: MatrixRef, codes: str, exponents: str) -> tuple[Part, ...]:
    """Return a matrix's tensors by their names; raises ModelLoadError if it cannot be stored so."""
    check_groups(matrix, "MXFP8", GROUP)
    rows, columns = matrix.rows, matrix.columns
    return (
        Part("codes", codes, (E4M3,), ((rows, columns),)),
        Part(EXPONENTS, exponents, EXPONENT_DTYPES, ((rows, columns // GROUP),)),
    )
