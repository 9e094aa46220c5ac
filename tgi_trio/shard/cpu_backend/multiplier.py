"""Compile-time choices of a product with quantised weights; `variant.py` has those of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tgi_trio.shard.cpu_backend.kinds.kind import (
    BLOCK_INPUTS,
    FACTS_BYTES,
    MOST_ZERO,
    Kind,
    active_block_bytes,
    unpacked,
)

# Instructions for products of integers: AVX512's dot product of bytes (VNNI), the older ones of
# AVX512 and AVX2, ARM's dot product, or what LLVM makes of plain multiplications.
Dots = Literal["vnni", "avx512", "avx2", "neon", "plain"]
# How panels are multiplied: by vectors; by a matrix unit those codes that have been unpacked for
# many rows, as pairs of bfloat16, or with the digits of activations.
Way = Literal["vectors", "codes", "pairs", "digits"]
_MOST_OF_16_BITS = 32767


@dataclass(frozen=True, slots=True)
class Multiplier:
    """A way to multiply weights of a kind."""

    kind: Kind
    # Of activations: 8 or 16 for integers with a scale for 32 of them. For codes that are not
    # integers: 16 for bfloat16, multiplied in pairs, or 32 for float32.
    active_bits: int
    dots: Dots
    rows: int  # most rows of a tile
    half: bool  # the machine has instructions to widen float16
    matrix: bool = False  # a matrix unit multiplies: codes with many rows, pairs with any number
    looks_up: bool = False  # vectors look up 128 bytes at once (VBMI)
    both_caches: bool = False  # a single row fetches ahead into both caches of a core

    @property
    def way(self) -> Way:
        """The way to multiply, a key of `WAYS` in `machine_code/entry.py`."""
        if self.kind.by_rows:
            return "digits"
        if not self.matrix:
            return "vectors"
        return "pairs" if self.kind.floating else "codes"

    @property
    def digits(self) -> int:
        """Bytes of an activation, which a matrix unit multiplies one by one; 0: it does not."""
        return self.active_bits // 8 if self.kind.by_rows else 0

    @property
    def facts_bytes(self) -> int:
        """Bytes after a row of activations: the scale that they share, and padding."""
        return FACTS_BYTES if self.kind.by_rows else 0

    @property
    def name(self) -> str:
        """A name that identifies this multiplier among all."""
        half = "half" if self.half else "float"
        matrix = " matrix" if self.matrix else ""
        bytes_ = " bytes" if self.looks_up else ""
        caches = " caches" if self.both_caches else ""
        words = f"{self.kind.name} {self.active_bits} {self.dots} {self.rows} {half}"
        return f"{words}{matrix}{bytes_}{caches}"

    @property
    def raised(self) -> int:
        """Bits by which codes are shifted left when they are unpacked.

        VNNI can multiply bytes of any size. There the shift makes `MOST_ZERO` the zero code of all
        kinds that have one, so its share of a sum is stored with the activations and need not be
        computed for each row. Scales are smaller by the same power of two, so products stay the
        same.
        """
        kind = self.kind
        if self.dots != "vnni" or kind.floating or kind.table or not kind.zero:
            return 0
        return (MOST_ZERO // kind.zero).bit_length() - 1

    @property
    def zero_code(self) -> int:
        """The zero code of what is multiplied.

        The values of a table get the same as all other codes where bytes may be of any size, and
        the least elsewhere: of products of small codes more can be added in 16 bits.
        """
        if self.kind.table and self.dots == "vnni":
            return MOST_ZERO
        return self.kind.least_zero << self.raised

    @property
    def ahead(self) -> int:
        """Bytes that a single row fetches ahead, into the first-level cache."""
        return 2304 if self.both_caches else 4608

    @property
    def further(self) -> int:
        """Bytes behind those that it fetches into the second-level cache; 0: none."""
        return 2048 if self.both_caches else 0

    @property
    def most_in_one_pass(self) -> int:
        """Rows of a lone tile up to which both halves of a panel are multiplied at once.

        It has been measured where a row fetches into both caches. Registers hold eight rows' sums
        of both, and the codes, unless a block has two scales.
        """
        if not self.both_caches or self.active_bits != 8 or self.digits:
            return 1
        return self.rows if self.kind.parts == 1 else 4

    @property
    def least_four(self) -> int:
        """Rows from which a tile of four is faster than single rows."""
        return 2 if self.rows >= 8 else 3

    @property
    def takes_two(self) -> bool:
        """Whether two rows are a tile of both halves of a panel, as a single row is."""
        return self.dots == "avx2"

    @property
    def least_full(self) -> int:
        """Rows from which a full tile is faster than smaller ones."""
        return 6 if self.rows >= 8 else self.rows

    @property
    def least_unpacked(self) -> int:
        """Rows from which a panel is unpacked before it is multiplied.

        Unpacking uses execution units that the products leave idle; AVX2's products leave few. A
        matrix unit multiplies what is unpacked: 32 rows take as long with it as without.
        """
        kind = self.kind
        if self.dots != "avx2":
            return 33
        if kind.floating:  # the longer a number takes to make, the fewer rows
            return {"table": 5, "e4m3": 12}.get(kind.floating, 2)
        return 33 if kind.bits in (4, 8) and not kind.table and not kind.span_head else 12

    @property
    def keeps_neighbours(self) -> bool:
        """Whether unpacked numbers lie beside their neighbours, see `neighbours.py`."""
        return self.dots == "avx2" and bool(self.kind.floating)

    @property
    def chunk_blocks(self) -> int:
        """Blocks of an unpacked panel that all rows are multiplied with before others; 0: all.

        Half of so many float32 numbers, which a pass reads, is half of a nearest cache of 32 KiB.
        """
        return 8 if self.keeps_neighbours else 0

    @property
    def active_bytes(self) -> int:
        """Bytes of the activations that a block of weights is multiplied with."""
        if self.kind.floating or self.kind.by_rows:
            return BLOCK_INPUTS * self.active_bits // 8
        return active_block_bytes(self.active_bits)

    @property
    def block_bytes(self) -> int:
        return self.kind.block_bytes

    @property
    def table_bytes(self) -> int:
        return self.kind.table_bytes

    @property
    def span_bytes(self) -> int:
        return self.kind.span_bytes

    @property
    def pairs(self) -> bool:
        """Whether a matrix unit multiplies pairs of bfloat16."""
        return self.way == "pairs"

    @property
    def alone(self) -> bool:
        """Whether vectors multiply a single row of such pairs, in the order of the unit.

        Codes of 4 bits are read from memory faster than they are unpacked for the unit.
        """
        return self.pairs and self.kind.bits == 4

    @property
    def signed(self) -> bool:
        """Whether a matrix unit multiplies unpacked codes that count from their zero.

        Then no sum starts with what zeros add.
        """
        return self.unpacked.zero_code == MOST_ZERO

    @property
    def signs(self) -> int:
        """The bits of each four unpacked codes whose flipping makes them signed, or unsigned if
        they are stored signed; 0: no need.
        """
        return 0x80808080 if self.matrix and not self.pairs and self.signed else 0

    @property
    def slots(self) -> int:
        """Blocks in a matrix unit's four registers of sums: one for each part of a block."""
        return 4 // self.kind.parts

    @property
    def head_bytes(self) -> int:
        return self.kind.head_bytes

    @property
    def unpacked(self) -> Multiplier:
        """The multiplier of the same weights after `unpack_block`."""
        return replace(self, kind=unpacked(self.kind, self.zero_code, self.active_bits))


def multiplies_bytes(dots: Dots, largest_code: int) -> bool:
    """Return whether codes can be multiplied with 8-bit activations.

    The older instructions add two products in 16 bits, which large codes would overflow.
    """
    return dots in ("vnni", "plain", "neon") or pairs_that_fit(largest_code) > 0


def pairs_that_fit(largest_code: int) -> int:
    """Return how many pairs of products of codes and 127 can be added in 16 bits."""
    return _MOST_OF_16_BITS // (2 * 127 * largest_code)
