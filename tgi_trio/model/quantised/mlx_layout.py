"""MLX (Apple 2023): affine codes in 32-bit words, and its words of MXFP4, MXFP8 and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.layout import (
    EXPONENTS,
    FLOATS,
    STEPS,
    Headers,
    Part,
    check_groups,
    count_words,
    read_count,
    split_name,
)

Mode = Literal["affine", "mxfp4", "mxfp8", "nvfp4"]

LOWS: Final = "lows"  # the role of what is added to scaled codes
_BITS: Final = (2, 3, 4, 5, 6, 8)
_GROUPS: Final = (32, 64, 128)
# The bits and the group of each mode of floating-point numbers.
_FLOATING: Final[Mapping[Mode, tuple[int, int]]] = {
    "mxfp4": (4, 32),
    "mxfp8": (8, 32),
    "nvfp4": (4, 16),
}


@dataclass(frozen=True, slots=True)
class Packed:
    """How a matrix is packed."""

    mode: Mode
    bits: int
    group: int  # inputs that share a scale


@dataclass(frozen=True, slots=True)
class MlxLayout:
    """weight = scale * code + bias, or scale * number; config.json lists modules that differ.

    It has their names in mlx-lm, which `mlx_names.py` has undone; but their tensors show the same.
    """

    usual: Packed

    name = "mlx"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module, weight = split_name(matrix.name), tensors.get(matrix.name)
        scales = tensors.get(f"{module}.scales")
        if module is None or weight is None or (weight.dtype != "U32" and scales is None):
            return ()
        own = self.usual
        if scales is not None and weight.shape and scales.shape:
            small = scales.dtype == "U8"
            own = read_packed(matrix.columns, weight.shape[-1], scales.shape[-1], small) or own
        check_groups(matrix, "MLX's words", max(own.group, 32))
        rows, groups = matrix.rows, matrix.columns // own.group
        words = (rows, count_words(matrix.columns, own.bits))
        codes = Part("codes", matrix.name, ("U32",), (words,))
        if own.mode != "affine":
            role = STEPS if own.mode == "nvfp4" else EXPONENTS
            return codes, Part(role, f"{module}.scales", ("U8",), ((rows, groups),))
        return (
            codes,
            Part("scales", f"{module}.scales", FLOATS, ((rows, groups),)),
            Part(LOWS, f"{module}.biases", FLOATS, ((rows, groups),)),
        )


def read_packed(columns: int, words: int, groups: int, small: bool) -> Packed | None:
    """Return how a matrix with so many inputs is packed, by the words and groups of an output.

    `small`: scales have 8 bits. None: such words and groups are no packing of MLX's.
    """
    bits = next((bits for bits in _BITS if words * 32 == columns * bits), 0)
    group = columns // groups if groups and columns % groups == 0 else 0
    if small:
        found = (mode for mode, packed in _FLOATING.items() if packed == (bits, group))
        return next((Packed(mode, bits, group) for mode in found), None)
    return Packed("affine", bits, group) if bits and group in _GROUPS else None


def read_mlx_layout(where: str, quant_config: Mapping[str, Any]) -> MlxLayout:
    """Return the layout from MLX's description; raises ModelLoadError for unsupported variants."""
    usual = _read_packed(where, quant_config)
    for module, own in quant_config.items():
        if isinstance(own, dict) and "bits" in own:
            _read_packed(f"{where} for {module}", own)
    return MlxLayout(usual)


def _read_packed(where: str, quant_config: Mapping[str, Any]) -> Packed:
    mode = cast(Mode, str(quant_config.get("mode") or "affine"))
    bits, group = (
        read_count(where, quant_config, "bits"),
        read_count(where, quant_config, "group_size"),
    )
    known = bits in _BITS and group in _GROUPS
    if mode != "affine":
        known = _FLOATING.get(mode) == (bits, group)
    if not known or quant_config.get("global_scale"):
        factor = " with a factor" if quant_config.get("global_scale") else ""
        raise ModelLoadError(
            f"{where} says {mode}{factor} of MLX with {bits} bits in groups of {group}; read are "
            f"affine with {', '.join(map(str, _BITS))} bits in groups of "
            f"{', '.join(map(str, _GROUPS))}, mxfp4, mxfp8, and nvfp4 without a factor."
        )
    return Packed(mode, bits, group)
