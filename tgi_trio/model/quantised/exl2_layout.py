"""EXL2: codes of 2 to 8 bits, mixed within a matrix, as exllamav2 stores them (turboderp 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.layout import Headers, Part, split_name

BITS: Final = (2, 3, 4, 5, 6, 8)
TOGETHER: Final = 32  # inputs whose codes fill whole words, whatever their bits
_PADDED: Final = 32  # outputs are padded to its multiples


@dataclass(frozen=True, slots=True)
class Exl2Layout:
    """weight = scale * (code - half of the codes' range), with the scale of the input's group.

    Inputs are sorted by importance; groups of them have bits of their own, most bits first.
    """

    name = "exl2"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module = split_name(matrix.name)
        codes = None if module is None else tensors.get(f"{module}.q_weight")
        if codes is None:
            return ()
        outputs = -(-matrix.rows // _PADDED) * _PADDED
        if matrix.columns % TOGETHER:
            raise ModelLoadError(
                f"{matrix.name!r} of {matrix.rows} x {matrix.columns} cannot be stored as EXL2: "
                f"inputs come by {TOGETHER}."
            )
        # How many words and groups there are depends on the groups' bits: `Exl2Source` adds up.
        words = codes.shape[0] if codes.shape else 0
        pairs = tensors.get(f"{module}.q_groups")
        groups = pairs.shape[0] // 2 if pairs and pairs.shape else 1
        return (
            Part("codes", f"{module}.q_weight", ("I32",), ((words, outputs),)),
            Part("groups", f"{module}.q_groups", ("I16",), ((2 * groups,),)),
            Part("scale codes", f"{module}.q_scale", ("I32",), ((groups, outputs // 8),)),
            Part("largest", f"{module}.q_scale_max", ("F16",), ((groups,),)),
            Part("places", f"{module}.q_invperm", ("I32",), ((matrix.columns,),)),
        )


def read_exl2_layout(where: str, quant_config: Mapping[str, Any]) -> Exl2Layout:
    """Return the layout; EXL2's description holds averages, and each matrix describes itself."""
    return Exl2Layout()
