"""The layout of quantised weights in panels, by kind: plain data, for packing and for the kernels.

A *block* is 32 inputs of the 32 outputs of a panel: the numbers of its *head*, then its codes. Some
kinds have a second head before a *span*, a run of blocks: scales of scales, or those of a group.

    weight = scale * (code - zero) - low

where scale and low are products of numbers in the heads. In some kinds codes are not integers but
are floating-point numbers or indices of some, which are multiplied in float32:

    weight = scale * number
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.fit.kernel_claims import PANEL
from tgi_trio.shard.checkpoint.numbers import to_bfloat16
from tgi_trio.shard.cpu_backend.kinds.rings import fill_rings

Array = NDArray[Any]
BLOCK_INPUTS = 32
MOST_ZERO = 128  # the largest zero code
_ZEROS_OF_TABLES = (16, MOST_ZERO)
# Numbers in a head: float16, float32, signed and unsigned bytes; "e8": the exponent of a power of
# two, with float32's bias; "i4": int32.
Number = Literal["f2", "f4", "i1", "u1", "e8", "i4"]
# What codes are if not integers. 4 bits: one of 16 numbers in a table before the panel. 8 bits:
# sign, four exponent bits and three fraction bits. Unpacked codes of 16 or 32 bits are the number
# to multiply: bfloat16 or float32. Codebooks of EXL3: numbers of what a code and the codes before
# it in its ring make up, see `trellis.py`.
Floating = Literal["table", "e4m3", "bfloat16", "float32", "3inst", "mcg", "mul1"]
CODEBOOKS = ("3inst", "mcg", "mul1")
E4M3_NO_NUMBER = 127  # NaN, by the seven lower bits
# 16 float32 numbers; then, of the same rounded to bfloat16, all upper bytes and all lower bytes.
_TABLE_BYTES = 96
# The order of four inputs of an output in the bytes of a word, for floating-point codes: every
# second byte belongs to neighbouring inputs.
FLOATING_ORDER = (0, 2, 1, 3)
_BYTES: dict[Number, int] = {"f2": 2, "f4": 4, "i1": 1, "u1": 1, "e8": 1, "i4": 4}


@dataclass(frozen=True, slots=True)
class Field:
    """A number in a head: one for each output, or `parts` of them."""

    name: str
    number: Number
    parts: int = 1  # parts of a block's inputs, each with its own number

    @property
    def bytes(self) -> int:
        """Bytes of all outputs of a panel."""
        return _BYTES[self.number] * self.parts * PANEL

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("u1" if self.number == "e8" else f"<{self.number}")


@dataclass(frozen=True, slots=True)
class Kind:
    """A way of storing quantised weights; `name` identifies it where kernels are compiled."""

    name: str
    bits: (
        int  # of a code in a panel: 2, 4, 5, 6 or 8; of an unpacked floating-point number: 16 or 32
    )
    scale: tuple[str, ...]  # names of the fields whose product is the scale
    head: tuple[Field, ...]  # before the codes of every block
    zero: int = 0  # the zero code: 0, or a power of two up to `MOST_ZERO`
    low: tuple[str, ...] = ()  # names of fields, as for `scale`; (): no low
    span_head: tuple[Field, ...] = ()  # before the first block of a span
    span: int = 0  # inputs of a span; 0: depends on the matrix; -1: all
    # The values of the 16 codes, from -127 to 127; (): codes are their values.
    table: tuple[int, ...] = ()
    # The table of floating-point codes of 4 bits that all matrices have, of numbers that the upper
    # bytes of float16 hold; (): each has its own.
    numbers: tuple[float, ...] = ()
    largest: int = 0  # the largest code; 0: all `bits` set
    floating: Floating | None = None  # None: codes are integers
    # Whether activations of a whole row share a scale, see `kernels/quantised/digits.py`. Codes are
    # then stored signed, and the last numbers of a span's head are what its sums start from.
    by_rows: bool = False

    @property
    def least_zero(self) -> int:
        """The least zero code: what makes the values of a table unsigned, where there is one."""
        if not self.table:
            return self.zero
        return next(zero for zero in _ZEROS_OF_TABLES if zero >= -min(self.table))

    @property
    def parts(self) -> int:
        """Parts of a block's inputs with separate scales."""
        fields = {field.name: field for field in (*self.head, *self.span_head)}
        return max(fields[name].parts for name in self.scale)

    @property
    def low_parts(self) -> int:
        """Parts of a block's inputs with separate lows; 0: no lows."""
        fields = {field.name: field for field in (*self.head, *self.span_head)}
        return max((fields[name].parts for name in self.low), default=0)

    @property
    def turned(self) -> bool:
        """Whether products are those of activations that Hadamard's matrix has turned."""
        return self.floating in CODEBOOKS

    @property
    def table_bytes(self) -> int:
        """Bytes before the first span of a panel: the numbers that codes stand for."""
        return _TABLE_BYTES if self.floating == "table" else 0

    @property
    def head_bytes(self) -> int:
        return sum(field.bytes for field in self.head)

    @property
    def span_bytes(self) -> int:
        return sum(field.bytes for field in self.span_head)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block with its head."""
        return self.head_bytes + self.bits * BLOCK_INPUTS * PANEL // 8

    @property
    def largest_code(self) -> int:
        """The largest code that is multiplied: of a table, its largest value behind the zero."""
        if self.table:
            return self.least_zero + max(self.table)
        return self.largest or (1 << self.bits) - 1

    def spans(self, inputs: int, span: int) -> int:
        """Return how many spans of `span` inputs a panel has, of which the last may have fewer; 0
        if the kind has no spans.
        """
        return -(-inputs // span) if self.span_head else 0

    def panel_bytes(self, inputs: int, span: int) -> int:
        """Return the size of a panel whose spans are `span` inputs each."""
        blocks = inputs // BLOCK_INPUTS * self.block_bytes
        return self.table_bytes + blocks + self.spans(inputs, span) * self.span_bytes


def unpacked(kind: Kind, zero: int, active_bits: int) -> Kind:
    """Return the unpacked kind, with a byte per code and float32 heads, shared by many rows.

    `active_bits`: of activations; codes that are not integers get as many. `zero`: the zero code of
    what is multiplied. Sums of integers are exact, so unpacking does not change them.
    """
    if kind.floating:
        name, scale = f"unpacked floats of {active_bits}", (Field("scale", "f4"),)
        number: Floating = "bfloat16" if active_bits == 16 else "float32"
        return Kind(name, active_bits, ("scale",), scale, floating=number)
    # Codes with this zero count as using all of a byte, so that most kinds share one unpacked kind.
    largest = 255 if zero == MOST_ZERO else kind.largest_code
    head = [
        Field("scale", "f4", kind.parts),
        *([Field("low", "f4", kind.low_parts)] if kind.low else []),
    ]
    return Kind(
        f"unpacked {kind.parts} {f'low {kind.low_parts}' if kind.low else zero} to {largest}",
        8,
        ("scale",),
        tuple(head),
        zero=zero,
        low=("low",) if kind.low else (),
        largest=largest,
    )


# What is added to the digits of activations to make them unsigned, see `Kind.by_rows`.
DIGIT_ZERO = 128
FACTS_BYTES = 64  # after the digits of a row: their scale, float32, and nothing
# After the 32 activations of a block: their scale, their sum (float32), and -`MOST_ZERO` times the
# sum of their integers: of all, of the first and of the second half (int32).
_FACTS_BYTES = 20


def active_block_bytes(bits: int) -> int:
    """Return the bytes of 32 integer activations of 8 or 16 bits, with scale and sums."""
    return BLOCK_INPUTS * bits // 8 + _FACTS_BYTES


@dataclass(frozen=True, slots=True)
class Codes:
    """Weights of one kind, as packing reads them: some rows of a matrix."""

    codes: NDArray[np.uint8]  # [out, in]
    numbers: Mapping[str, Array]  # of every field [out, blocks or spans] or [.., parts]
    table: NDArray[np.float32] | None = None  # [16], the values of codes with a table


@dataclass(frozen=True, slots=True)
class StoredKind:
    """A kind, and the conversion of a checkpoint's matrices to its codes."""

    kind: Kind
    read: Callable[[Mapping[str, Array]], Codes]  # from `StoredMatrix.planes`


def fill_panels(panels: NDArray[np.uint8], kind: Kind, given: Codes, span: int) -> None:
    """Write codes [out, in] into `panels` uint8 [out / 32, bytes of a panel], which is all zeros.

    `span`: inputs of a span; the last may have fewer. Missing rows of the last panel stay 0, scales
    included, and so do their results.
    """
    outputs, inputs = given.codes.shape
    count = math.ceil(outputs / PANEL)
    span = span if kind.span_head else inputs
    if given.table is not None:
        panels[:count, : kind.table_bytes] = _table(given.table)
    whole = inputs // span * span
    middle = kind.panel_bytes(whole, span)
    if whole < inputs:  # the numbers of such kinds are those of spans
        last = {name: values[:, -1:] for name, values in given.numbers.items()}
        rest = Codes(given.codes[:, whole:], last)
        _fill_spans(panels[:count, middle:], kind, rest, inputs - whole)
        numbers = {name: values[:, :-1] for name, values in given.numbers.items()}
        given = Codes(given.codes[:, :whole], numbers)
    _fill_spans(panels[:count, kind.table_bytes : middle], kind, given, span)


def _fill_spans(panels: NDArray[np.uint8], kind: Kind, given: Codes, span: int) -> None:
    """Fill a part of panels that has spans of one size."""
    (outputs, inputs), count = given.codes.shape, len(panels)
    spans = panels.reshape(count, inputs // span, -1)  # a view
    blocks = spans[:, :, kind.span_bytes :].reshape(*spans.shape[:2], -1, kind.block_bytes)  # views
    if kind.by_rows:
        given = _signed(given, span)
    _fill_head(spans, kind.span_head, given)
    _fill_head(blocks, kind.head, given)
    codes = given.codes
    if kind.turned:
        fill_rings(blocks, kind.bits, _whole(codes))
        return
    if kind.floating:
        codes = codes.reshape(outputs, -1, 4)[..., FLOATING_ORDER].reshape(outputs, inputs)
    _fill_codes(blocks[..., kind.head_bytes :], kind.bits, _whole(codes))


def _signed(given: Codes, span: int) -> Codes:
    """Return codes less their zero, as bytes, with what the sums of spans start from: "starts"."""
    codes = given.codes ^ np.uint8(MOST_ZERO)
    spans = codes.view(np.int8).reshape(len(codes), -1, span)
    starts = -DIGIT_ZERO * spans.sum(axis=2, dtype=np.int32)
    return Codes(codes, {**given.numbers, "starts": starts})


def _table(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return a table as stored before a panel."""
    pairs = to_bfloat16(numbers).view(np.uint8).reshape(-1, 2)
    return np.concatenate([numbers.view(np.uint8), pairs[:, 1], pairs[:, 0]])


def _fill_head(places: NDArray[np.uint8], fields: tuple[Field, ...], given: Codes) -> None:
    """Write the numbers of fields into `places` [panels, spans, bytes], or [.., blocks, bytes]."""
    begin = 0
    for field in fields:
        numbers = np.ascontiguousarray(given.numbers[field.name], field.dtype)
        outputs, count = numbers.shape[:2]
        numbers = _whole(numbers.reshape(outputs, -1)).reshape(-1, PANEL, count, field.parts)
        lanes = np.ascontiguousarray(numbers.transpose(0, 2, 3, 1))
        end = begin + field.bytes
        places[..., begin:end] = lanes.view(np.uint8).reshape(*places.shape[:-1], -1)
        begin = end


def _whole(rows: Array) -> Array:
    """Return rows [out, n] padded with zeros to whole panels."""
    missing = -len(rows) % PANEL
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows


def _fill_codes(places: NDArray[np.uint8], bits: int, codes: NDArray[np.uint8]) -> None:
    """Write codes [out, in] into `places` [panels, spans, blocks of a span, bytes].

    A vector holds 4 inputs of 16 outputs, a byte each. For 4 bits, vectors v and v + 4 share one,
    the latter in the high nibbles; for 2 bits, vectors v, v + 2, v + 4 and v + 6. The further bits
    of 5- and 6-bit codes follow in planes: bit v of a byte for vector v; or two bits each for 4
    vectors, in each of two planes.
    """
    count = places.shape[0]
    rows = codes.reshape(count, PANEL, -1, 8, 4)  # panel, output, block, vector, input
    if bits == 8:
        _lay(places, rows)
        return
    if bits == 2:
        _lay(places, _gather(rows.reshape(*rows.shape[:3], 4, 2, 4).swapaxes(3, 4), 2))
        return
    low = rows & np.uint8(15) if bits > 4 else rows
    packed = low[..., :4, :] | low[..., 4:, :] << np.uint8(4)
    end = 4 * 4 * PANEL
    _lay(places[..., :end], packed)
    if bits == 5:
        fifth = rows >> np.uint8(4)
        _lay(places[..., end:], _gather(fifth, 1)[..., None, :])
    elif bits == 6:
        upper = (rows >> np.uint8(4)).reshape(*rows.shape[:3], 2, 4, 4)
        _lay(places[..., end:], _gather(upper, 2))


def _gather(parts: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return [..., 4] packed from [..., vectors, 4] numbers of `bits` bits, the first lowest."""
    result = parts[..., 0, :].copy()
    for vector in range(1, parts.shape[-2]):
        result |= parts[..., vector, :] << np.uint8(bits * vector)
    return result


def _lay(places: NDArray[np.uint8], rows: NDArray[np.uint8]) -> None:
    """Write [panels, outputs, blocks, vectors, 4], with outputs next to each other."""
    words = np.ascontiguousarray(rows).view(np.uint32)[..., 0]
    lanes = np.ascontiguousarray(words.transpose(0, 2, 3, 1))
    places[:] = lanes.view(np.uint8).reshape(places.shape)
