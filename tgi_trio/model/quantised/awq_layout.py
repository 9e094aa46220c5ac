"""AWQ (Lin and others 2023, arXiv 2306.00978), as AutoAWQ stores it for its GEMM kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.layout import (
    FLOATS,
    Headers,
    Part,
    check_bits,
    count_groups,
    read_count,
    split_name,
)


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """weight = scale * (code - zero), 4 bits, with a scale and zero per group of inputs."""

    group: int  # inputs that share a scale; -1: all

    name = "awq"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module = split_name(matrix.name)
        if module is None or f"{module}.qweight" not in tensors:
            return ()
        rows, columns = matrix.rows, matrix.columns
        if rows % 8 or matrix.transposed or (self.group != -1 and columns % self.group):
            raise ModelLoadError(
                f"{matrix.name!r} of {rows} x {columns} cannot be stored as AWQ in groups of "
                f"{self.group}: outputs come by eight, and inputs in whole groups."
            )
        groups = count_groups(matrix, self.group)
        return (
            Part("codes", f"{module}.qweight", ("I32",), ((columns, rows // 8),)),
            Part("zeros", f"{module}.qzeros", ("I32",), ((groups, rows // 8),)),
            Part("scales", f"{module}.scales", FLOATS, ((groups, rows),)),
        )


def read_awq_layout(where: str, quant_config: Mapping[str, Any]) -> AwqLayout:
    """Return the layout from AWQ's description; raises ModelLoadError for unsupported variants."""
    form = str(quant_config.get("version") or "gemm").lower()
    if form != "gemm":
        raise ModelLoadError(
            f"{where} says that AWQ's weights are in the order {form!r}; gemm alone is read."
        )
    bits = read_count(where, quant_config, "w_bit" if "w_bit" in quant_config else "bits", 4)
    group = read_count(
        where, quant_config, "q_group_size" if "q_group_size" in quant_config else "group_size", 128
    )
    check_bits(where, "AWQ", bits, group, (4,))
    return AwqLayout(group)
