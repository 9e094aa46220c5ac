"""EXL3: trellis codes of 1 to 8 bits between Hadamard transforms, as exllamav3 stores them.

A variant of QTIP (Tseng and others 2024, arXiv 2406.11235), by turboderp 2025.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.layout import ONE, Headers, Part, split_name

TILE: Final = 16  # inputs and outputs of a tile, whose weights share a trellis
TURNED: Final = 128  # inputs, and outputs, that a Hadamard transform mixes
# Roles of the one number that says which codebook a matrix has; without one it is 3INST.
MCG, MUL1 = "mcg", "mul1"
CODEBOOKS: Final = ("3inst", MCG, MUL1)  # in config.json
_HALF: Final = 8  # 16-bit words of a tile for half a bit of each weight
_MOST: Final = 16  # half bits of a weight


@dataclass(frozen=True, slots=True)
class Exl3Layout:
    """weight = output scale * H (input scale * H (numbers of a trellis)), H Hadamard's matrix.

    Every matrix shows its bits and its codebook by its tensors.
    """

    name = "exl3"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module = split_name(matrix.name)
        codes = None if module is None else tensors.get(f"{module}.trellis")
        if codes is None:
            return ()
        if f"{module}.scale" in tensors or matrix.transposed:
            raise ModelLoadError(
                f"{matrix.name!r} of {matrix.rows} x {matrix.columns} cannot be stored as EXL3: "
                "rows are outputs, and no scale of the whole matrix is read."
            )
        halves = _count_half_bits(f"{module}.trellis", codes)
        marked = {role: f"{module}.{role}" in tensors for role in (MCG, MUL1)}
        if all(marked.values()) or (halves % 2 and not marked[MUL1]):
            raise ModelLoadError(
                f"{matrix.name!r} in {codes.file} has {halves / 2:g} bits and the codebook "
                f"{' and '.join(role for role, there in marked.items() if there) or '3inst'}; a "
                f"matrix of EXL3 has one codebook, and half a bit with {MUL1} alone."
            )
        inputs, outputs = (-(-size // TURNED) * TURNED for size in (matrix.columns, matrix.rows))
        words = (inputs // TILE, outputs // TILE, _HALF * halves)
        return (
            Part("codes", f"{module}.trellis", ("I16",), (words,)),
            _scales("input", f"{module}.su", inputs, tensors),
            _scales("output", f"{module}.sv", outputs, tensors),
            *(
                Part(role, f"{module}.{role}", ("I32",), ONE)
                for role in (MCG, MUL1)
                if marked[role]
            ),
        )


def _count_half_bits(name: str, codes: StoredTensor) -> int:
    """Return how many half bits a weight has, by its tiles' words."""
    halves, left = divmod(codes.shape[-1] if len(codes.shape) == 3 else 0, _HALF)
    if left or not 2 <= halves <= _MOST:
        raise ModelLoadError(
            f"Tensor {name!r} in {codes.file} has shape {list(codes.shape)}, but EXL3 asks for "
            f"tiles of {2 * _HALF} to {_MOST * _HALF} words, by {_HALF}: 1 to 8 bits of a weight."
        )
    return halves


def _scales(side: str, name: str, count: int, tensors: Headers) -> Part:
    """Return the scales of inputs or outputs; the first checkpoints had nothing but signs."""
    if name in tensors and f"{name}h" not in tensors:
        return Part(f"{side} signs", name, ("I16",), ((count // 16,),))
    return Part(f"{side} scales", f"{name}h", ("F16",), ((count,),))


def read_exl3_layout(where: str, quant_config: Mapping[str, Any]) -> Exl3Layout:
    """Return the layout; raises ModelLoadError for an unknown codebook.

    The description holds averages, and each matrix describes itself.
    """
    codebook = quant_config.get("codebook")
    if codebook is not None and codebook not in CODEBOOKS:
        raise ModelLoadError(
            f"{where} says codebook {codebook!r} of EXL3; read are {', '.join(CODEBOOKS)}."
        )
    return Exl3Layout()
