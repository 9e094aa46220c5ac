"""HQQ (Badri and Shaji 2023): codes in parts of a matrix side by side, scales and real zero points.

Every matrix has tensors that describe it, so config.json need not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.layout import FLOATS, ONE, Headers, Part, split_name

ZEROS: Final = "zeros"  # the role of zero points, which are no whole numbers
_READ: Final = (1, 2, 3, 4, 8)  # bits; codes of 5 and 6 are stored as those of 8
# Codes of 3 bits come by ten in a word of 32, and their rows are padded to tens.
_TENS: Final = 10
# Integers of a description, and the other tensors of one, which say no more than these.
_NUMBERS: Final = ("nbits", "group_size", "axis")
_FLAGS: Final = (
    *("view_as_float", "quant_scale", "quant_zero", "offload_meta", "encoded_state_dict"),
    *("stores_quant_config", "channel_wise", "optimize", "round_zero"),
)
_WORDS: Final = ("packing", "unpack_view_dtype", "compute_dtype")
_SIZES: Final[Mapping[str, int]] = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4}


@dataclass(frozen=True, slots=True)
class Grouping:
    """How codes of a matrix are packed, and which of them share a scale."""

    bits: int
    group: int  # weights that share a scale
    axis: int  # 1: neighbours in a row; 0: those that lie as far apart as there are scales

    @property
    def together(self) -> int:
        """Codes of a word, which is a byte unless codes have 3 bits."""
        return _TENS if self.bits == 3 else 8 // self.bits

    def row(self, weights: int) -> int:
        """Return the codes of a row, as HQQ shapes a matrix before it packs rows."""
        return self.group if self.axis == 1 else weights // self.group

    def count_words(self, weights: int) -> int:
        """Return the number of words of a matrix."""
        row = self.row(weights)
        return math.ceil(weights // row / self.together) * row


@dataclass(frozen=True, slots=True)
class HqqLayout:
    """weight = scale * (code - zero), with the scale and zero of its group."""

    name = "hqq"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module = split_name(matrix.name)
        codes = tensors.get(f"{module}.W_q")
        if module is None or codes is None:
            return ()
        numbers = [_read_number(f"{module}.{name}", tensors) for name in _NUMBERS]
        own, weights = check_grouping(module, matrix, *numbers), matrix.rows * matrix.columns
        scales = (weights // own.group, 1) if own.axis == 1 else (1, weights // own.group)
        words = own.count_words(weights)
        row = own.row(weights)
        kinds = ("I32",) if own.bits == 3 else ("U8",)
        if codes.dtype in FLOATS:  # the same bytes, as numbers of the model's dtype
            kinds = (codes.dtype,)
            size = 4 if own.bits == 3 else 1
            row = row * size // _SIZES[codes.dtype]
            words = words * size // _SIZES[codes.dtype]
        described = ((name, "I32", ONE) for name in _NUMBERS)
        flags = ((name, "U8", ONE) for name in _FLAGS)
        found = ((name, tensors.get(f"{module}.{name}")) for name in _WORDS)
        texts = ((name, "U8", (text.shape,)) for name, text in found if text is not None)
        return (
            Part("codes", f"{module}.W_q", kinds, ((words // row, row),)),
            Part("scales", f"{module}.scale", FLOATS, (scales,)),
            Part(ZEROS, f"{module}.zero", FLOATS, (scales,)),
            *(Part(name, f"{module}.{name}", (kind,), shapes) for name, kind, shapes in described),
            Part("shape", f"{module}.shape", ("I64",), ((2,),), needed=False),
            *(
                Part(name, f"{module}.{name}", (kind,), tuple(shapes), needed=False)
                for name, kind, shapes in (*flags, *texts)
            ),
        )


def check_grouping(module: str, matrix: MatrixRef, bits: int, group: int, axis: int) -> Grouping:
    """Return how a matrix is packed; raises ModelLoadError for what HQQ does not write."""
    bits = 8 if bits in (5, 6) else bits
    weights = matrix.rows * matrix.columns
    whole = group > 0 and not (matrix.columns if axis == 1 else weights) % group
    if bits not in _READ or axis not in (0, 1) or not whole or matrix.transposed:
        raise ModelLoadError(
            f"{matrix.name!r} of {matrix.rows} x {matrix.columns} has {bits} bits in groups of "
            f"{group} along axis {axis} by HQQ's {module}.nbits, .group_size and .axis; read are "
            f"{', '.join(map(str, _READ))} bits in whole groups along axis 0 or 1."
        )
    own = Grouping(bits, group, axis)
    if bits != 3 and weights // own.row(weights) % own.together:
        raise ModelLoadError(
            f"{matrix.name!r} of {matrix.rows} x {matrix.columns} cannot be stored as HQQ in "
            f"{bits} bits in groups of {group}: {own.together} rows of codes are packed together."
        )
    return own


def _read_number(name: str, tensors: Headers) -> int:
    """Return an integer of a description; raises ModelLoadError if there is none."""
    stored: StoredTensor | None = tensors.get(name)
    if stored is None or stored.dtype != "I32" or stored.end - stored.first != 4:
        raise ModelLoadError(
            f"Tensor {name!r}, one whole number that describes a matrix of HQQ's, is missing or of "
            "another type."
        )
    with stored.file.open("rb") as file:
        file.seek(stored.first)
        return int.from_bytes(file.read(4), "little", signed=True)


def read_hqq_layout(where: str, quant_config: Mapping[str, Any]) -> HqqLayout:
    """Return the layout; a matrix's own tensors describe it."""
    return HqqLayout()
