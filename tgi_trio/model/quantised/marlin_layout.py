"""Marlin (Frantar and others 2024, arXiv 2408.11743), as stored by AutoGPTQ and vLLM's tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

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

TILE: Final = 16  # inputs, and outputs, of a tile, whose codes are stored together
OUTPUTS: Final = 64  # outputs of the four tiles whose codes are permuted together


@dataclass(frozen=True, slots=True)
class MarlinLayout:
    """weight = scale * (code - 8), 4 bits, with a scale per group of inputs."""

    group: int  # inputs that share a scale; -1: all

    name = "marlin"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module = split_name(matrix.name)
        if module is None or f"{module}.B" not in tensors:
            return ()
        rows, columns = matrix.rows, matrix.columns
        if rows % OUTPUTS or columns % TILE or (self.group != -1 and columns % self.group):
            raise ModelLoadError(
                f"{matrix.name!r} of {rows} x {columns} cannot be stored in Marlin's order in "
                f"groups of {self.group}: outputs come by {OUTPUTS}, inputs by {TILE} and in whole "
                "groups."
            )
        groups = count_groups(matrix, self.group)
        return (
            Part("codes", f"{module}.B", ("I32",), ((columns // TILE, rows * TILE // 8),)),
            Part("scales", f"{module}.s", FLOATS, ((groups, rows),)),
        )


def is_marlin(quant_config: Mapping[str, Any]) -> bool:
    """Return whether a description of GPTQ means Marlin, which has different tensors."""
    form = quant_config.get("checkpoint_format") or quant_config.get("format")
    return form == "marlin" or bool(quant_config.get("is_marlin_format"))


def read_marlin_layout(where: str, quant_config: Mapping[str, Any]) -> MarlinLayout:
    """Return the layout by Marlin's description; raises ModelLoadError for other variants."""
    bits, group = (
        read_count(where, quant_config, "bits", 4),
        read_count(where, quant_config, "group_size", -1),
    )
    check_bits(where, "that weights are in Marlin's order", bits, group, (4,))
    return MarlinLayout(group)
