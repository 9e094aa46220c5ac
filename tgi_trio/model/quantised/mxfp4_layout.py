"""MXFP4 (OCP Microscaling Formats 1.0, 2023), as gpt-oss' checkpoints store their experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.layout import EXPONENT_DTYPES, EXPONENTS, Headers, Part, check_groups

GROUP: Final = 32  # inputs that share a scale
_BYTES: Final = GROUP // 2


@dataclass(frozen=True, slots=True)
class Mxfp4Layout:
    """weight = 2^exponent * 4-bit number (e2m1); rows are outputs, unlike some other tensors'."""

    name = "mxfp4"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module = matrix.name.removesuffix(".weight")
        if f"{module}_blocks" not in tensors:
            return ()
        return mxfp4_parts(matrix, f"{module}_blocks", f"{module}_scales")


def mxfp4_parts(matrix: MatrixRef, codes: str, exponents: str) -> tuple[Part, ...]:
    """Return a matrix's tensors by their names; raises ModelLoadError if it cannot be stored so."""
    check_groups(matrix, "MXFP4", GROUP, by_outputs=False)
    rows, groups = matrix.rows, matrix.columns // GROUP
    return (
        Part("codes", codes, ("U8",), ((rows, groups, _BYTES), (rows, groups * _BYTES))),
        Part(EXPONENTS, exponents, EXPONENT_DTYPES, ((rows, groups),)),
    )


def packed_mxfp4_parts(matrix: MatrixRef, codes: str, exponents: str) -> tuple[Part, ...]:
    """Return the same for codes in signed bytes, as DeepSeek V4's experts have them."""
    packed, scales = mxfp4_parts(matrix, codes, exponents)
    return replace(packed, dtypes=("I8", *packed.dtypes)), scales


def read_mxfp4_layout(where: str, quant_config: Mapping[str, Any]) -> Mxfp4Layout:
    """Return the layout; descriptions only list matrices that are not quantised."""
    return Mxfp4Layout()
