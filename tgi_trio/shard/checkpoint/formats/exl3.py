"""EXL3: weights are numbers of a computed codebook, chosen by windows of a ring of bits.

A tile of 16 x 16 weights is a ring of bits, to which each weight adds some; the 16 bits that end
with a weight's own are its *state*, and a codebook makes a number of every state. A matrix of such
numbers has then been turned by Hadamard's matrix of 128 along inputs and outputs, with scales on
both sides. Source: exllamav3's packing (pack.cu, frac.cu), codebooks (codebook.cuh), order of
tiles (quantize.py) and transforms (hadamard.cu, exl3.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.quantised.exl3_layout import MCG, MUL1, TILE, TURNED
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.plain import view_numbers
from tgi_trio.shard.checkpoint.formats.quantised_matrix import (
    Array,
    QuantisedMatrix,
    QuantisedSource,
    check_finite,
)
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix

HALF_BITS: Final = " of half bits"  # the end of a coding
# The inputs of a tile in the order in which a ring passes those of one output.
RING: Final = tuple(2 * (i // 4) + i % 2 + 8 * (i % 4 // 2) for i in range(TILE))
WEIGHTS: Final = TILE * TILE  # of a tile
_WORDS: Final = WEIGHTS // 2 // 32  # of 32 bits, for half a bit of each weight


@dataclass(frozen=True, slots=True)
class Codebook:
    """How a state becomes a number: it is multiplied, and the product's parts are added."""

    name: str
    factor: int
    more: int = 0  # added to the product
    adds_bytes: bool = False  # its four bytes are added; else its halves, made float16


INST3: Final = Codebook("3inst", 89226354, 64248484)
OF_MCG: Final = Codebook(MCG, 0xCBAC1FED)
OF_MUL1: Final = Codebook(MUL1, 0x83DCD12D, adds_bytes=True)
BY_NAME: Final = {book.name: book for book in (INST3, OF_MCG, OF_MUL1)}
# Of each half of a product: its sign and lower bits are kept, and the rest makes it a float16
# number from 1/8 to 2.
KEPT, SET = 0x8FFF8FFF, 0x3B603B60
# Of bytes: (1024 + sum) * 1774 / 2^18 - 1329 / 2^7, as float16's nearest.
STEP, LOW, SHIFT = 1774, 1329 * 2048 - 1774 * 1024, 18


@dataclass(frozen=True, slots=True)
class Rings:
    """A matrix of whole tiles as it is stored, inputs and outputs padded to multiples of 128."""

    book: Codebook
    half_bits: int  # of a weight
    words: NDArray[np.uint32]  # [inputs / 16, outputs / 16, 4 * half bits], a view of the file
    input_scales: NDArray[np.float16]  # [inputs]
    output_scales: NDArray[np.float16]  # [outputs]


class Exl3Source(QuantisedSource):
    """Words int16 [inputs / 16, outputs / 16, 16 bits], scales float16 [inputs] and [outputs]."""

    group = TURNED
    step = TURNED
    together = TURNED

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, RawTensor]) -> None:
        """`parts` as `Exl3Layout` has them. Raises ModelLoadError for an unknown codebook."""
        super().__init__(shape, tuple(parts.values()))
        self._words = parts["codes"].data.view(np.uint32).reshape(*parts["codes"].shape[:2], -1)
        self.book = _find_codebook(parts)
        self._half_bits = self._words.shape[2] // _WORDS
        self.coding = f"{self.book.name}{HALF_BITS if self._half_bits % 2 else ''}"
        self.bits = -(-self._half_bits // 2)
        self._inputs, self._outputs = _Scales(parts, "input"), _Scales(parts, "output")

    def dequantise(self, rows: slice, columns: slice) -> Floats:
        """Return float32, of sums in float64, which are exact but for extreme scales."""
        first, outputs, inputs = self._whole(rows, columns)
        scales = self._outputs.read(outputs)[:, None] / TURNED
        values = np.empty((rows.stop - rows.start, inputs.stop - inputs.start), np.float32)
        for start in range(inputs.start, inputs.stop, TURNED):  # what stays in a core's cache
            block = slice(start, start + TURNED)
            numbers = turn(list_numbers(self.book)[self._states(outputs, block)])
            numbers *= self._inputs.read(block)[:, None]
            numbers = turn(np.ascontiguousarray(numbers.T)) * scales
            part = numbers[rows.start - first : rows.stop - first]
            values[:, start - inputs.start : start - inputs.start + TURNED] = part
        return values[:, : columns.stop - columns.start]

    def planes(self, rows: slice, columns: slice) -> Mapping[str, Array]:
        """Return "codes" uint8 [rows, columns], the bits that each weight adds to its ring, with
        the inputs of a tile in the order `RING`; "input scales" [columns] and "output scales"
        [rows], float32. Each of these is read alone by a part without rows or columns.

        Raises ModelLoadError for half bits, and for inputs that the file has padded.
        """
        codes = np.empty((rows.stop - rows.start, columns.stop - columns.start), np.uint8)
        if self._half_bits % 2 or columns.stop % TURNED:
            raise ModelLoadError(f"Codes of {self.tensors[0].name!r} have no planes.")
        if codes.size:
            first, end = rows.start // TILE * TILE, -(-rows.stop // TILE) * TILE
            states = self._states(slice(first, end), columns)
            states = states.reshape(-1, TILE, end - first)[:, RING].reshape(-1, end - first)
            codes[:] = states.T[rows.start - first : rows.stop - first] & ((1 << self.bits) - 1)
        return {
            "codes": codes,
            "input scales": self._inputs.read(columns).astype(np.float32),
            "output scales": self._outputs.read(rows).astype(np.float32),
        }

    def rings(self, outputs: range, inputs: range) -> Rings | None:
        """Return a rectangle as it is stored; None if it is not of all that is turned together.

        Raises ModelLoadError for a scale that is not finite.
        """
        borders = zip((outputs, inputs), self.shape, strict=True)
        if any(x.start % TURNED or (x.stop % TURNED and x.stop != end) for x, end in borders):
            return None
        below, beside = (slice(x.start, -(-x.stop // TURNED) * TURNED) for x in (outputs, inputs))
        tiles = (slice(x.start // TILE, x.stop // TILE) for x in (beside, below))
        return Rings(
            self.book,
            self._half_bits,
            self._words[tuple(tiles)],
            self._inputs.read(beside).astype(np.float16),
            self._outputs.read(below).astype(np.float16),
        )

    def coding_of(self, outputs: range, inputs: range) -> str:
        """Weights that are turned together have to stay together to be more than numbers."""
        ends = outputs.start, outputs.stop, inputs.start, inputs.stop
        return "turned in part" if any(end % TURNED for end in ends) else self.coding

    def _whole(self, rows: slice, columns: slice) -> tuple[int, slice, slice]:
        """Return the first output and all that are turned with those wanted, and the inputs."""
        first, end = rows.start // TURNED * TURNED, -(-rows.stop // TURNED) * TURNED
        last = -(-columns.stop // TURNED) * TURNED  # inputs may be padded
        return first, slice(first, end), slice(columns.start, last)

    def _states(self, outputs: slice, inputs: slice) -> NDArray[np.uint16]:
        """Return the states [inputs, outputs] of whole tiles."""
        tiles = self._words[
            inputs.start // TILE : inputs.stop // TILE, outputs.start // TILE : outputs.stop // TILE
        ]
        states = read_states(tiles, self._half_bits)
        places = states.reshape(*tiles.shape[:2], TILE, TILE).swapaxes(1, 2)
        return places.reshape(len(tiles) * TILE, -1)


@dataclass(frozen=True, slots=True)
class _Scales:
    """The scales of one side."""

    parts: Mapping[str, RawTensor]
    side: str

    def read(self, places: slice) -> Array:
        """Return finite float64; signs are bits, the lowest first, 1 for -1."""
        tensor = self.parts.get(f"{self.side} signs")
        if tensor is None:
            tensor = self.parts[f"{self.side} scales"]
            return check_finite(tensor, to_float32(view_numbers(tensor)[places])).astype(np.float64)
        bits = np.unpackbits(tensor.data.view(np.uint8), bitorder="little")
        return 1.0 - 2.0 * bits[places].astype(np.float64)


def read_rings(matrix: StoredMatrix) -> Rings | None:
    """Return a matrix as it is stored; None for those of other formats, and cut anywhere else.

    Raises ModelLoadError for a scale that is not finite.
    """
    if not isinstance(matrix, QuantisedMatrix) or not isinstance(matrix.source, Exl3Source):
        return None
    return matrix.source.rings(matrix.outputs, matrix.inputs)


def _find_codebook(parts: Mapping[str, RawTensor]) -> Codebook:
    """Return the codebook; the tensor that names it holds its factor."""
    for role in (MCG, MUL1):
        if role in parts:
            book, factor = BY_NAME[role], int(parts[role].data.view(np.uint32).item())
            if factor != book.factor:
                raise ModelLoadError(
                    f"Tensor {parts[role].name!r} in {parts[role].file.path} says a factor of "
                    f"{factor:#x}; the codebook {role} that is read has {book.factor:#x}."
                )
            return book
    return INST3


@cache
def list_numbers(book: Codebook) -> Array:
    """Return the number float64 [65536] of every state: float16 numbers, exactly."""
    states = np.arange(1 << 16, dtype=np.uint32)
    words = states * np.uint32(book.factor) + np.uint32(book.more)
    if book.adds_bytes:
        sums = words.view(np.uint8).reshape(-1, 4).sum(1, dtype=np.int64)
        exact: Array = ((STEP * sums - LOW) / float(1 << SHIFT)).astype(np.float16)
        rounded: Array = exact.astype(np.float64)
        return rounded
    halves = ((words & np.uint32(KEPT)) ^ np.uint32(SET)).view(np.float16).reshape(-1, 2)
    numbers: Array = (halves[:, 0] + halves[:, 1]).astype(np.float64)
    return numbers


@cache
def find_ends(half_bits: int) -> Array:
    """Return behind which bit of its ring each weight ends, for the 256 in the ring's order.

    Of half a bit, every second weight has one bit more than the others.
    """
    even = half_bits // 2
    ends: Array = np.cumsum(np.where(np.arange(WEIGHTS) % 2, half_bits - even, even))
    return ends


@cache
def find_turns() -> Array:
    """Return the place in the ring of each weight of a tile, [inputs, outputs] in one row.

    The ring goes by two neighbouring inputs, then those eight further, then outputs eight further,
    then the next two inputs: the order of a tensor core's operands.
    """
    inputs, outputs = np.divmod(np.arange(WEIGHTS), TILE)
    pair = 32 * (outputs % 8) + 8 * (inputs % 8 // 2)
    places: Array = pair + inputs % 2 + 2 * (inputs // 8) + 4 * (outputs // 8)
    return places


def read_states(tiles: NDArray[np.uint32], half_bits: int) -> NDArray[np.uint16]:
    """Return states [.., 256] in the order of `find_turns` from words [.., half bits].

    A ring's first bit is the highest of its first word.
    """
    halves = np.stack([tiles >> np.uint32(16), tiles & np.uint32(0xFFFF)], -1)
    halves = halves.reshape(*tiles.shape[:-1], -1).astype(np.uint32)
    joined = halves << np.uint32(16) | np.roll(halves, -1, -1)  # from each half word on
    starts = (find_ends(half_bits)[find_turns()] - 16) % (16 * halves.shape[-1])
    states: Array = joined[..., starts // 16] >> (16 - starts % 16).astype(np.uint32)
    return states.astype(np.uint16)


def turn(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Hadamard's matrix of 128, as Sylvester builds it, times every 128 rows of `numbers`.

    Without a library for matrices: the threads that read a checkpoint would each start its threads.
    """
    span, shape = 1, numbers.shape
    while span < TURNED:
        pairs = numbers.reshape(-1, 2, span * shape[1])
        turned = np.empty_like(pairs)
        np.add(pairs[:, 0], pairs[:, 1], out=turned[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=turned[:, 1])
        numbers, span = turned, 2 * span
    return numbers.reshape(shape)
