"""The layout of weights in memory, as packing writes it and the kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from tgi_trio.model.fit.kernel_claims import LANES as LANES
from tgi_trio.model.fit.kernel_claims import PANEL as PANEL

# Rows of activations after the last one, which a tile may read and ignore.
SPARE_ROWS: Final = 15

# How bfloat16 weights are multiplied: by AMX's matrix unit and by the dot product of pairs where
# there are no whole panels, by the dot product alone, or as float32.
Pairs: TypeAlias = Literal["amx", "dot", "float32"]


@dataclass(frozen=True, slots=True)
class EightBits:
    """An 8-bit floating-point format: a sign, the exponent, the fraction."""

    fraction: int  # bits
    bias: int  # of the exponent
    largest: float


# By the values of `--kv-cache-dtype` (Micikevicius et al. 2022, arXiv 2209.05433).
EIGHT_BITS: Final = {
    "fp8_e4m3fn": EightBits(3, 7, 448.0),
    "fp8_e5m2": EightBits(2, 15, 57344.0),
}


@dataclass(frozen=True, slots=True)
class CacheNumbers:
    """How K and V are stored, if not in the model's dtype."""

    name: str  # a key of `EIGHT_BITS`
    scales: Sequence[tuple[float, float]]  # of K and of V of each layer


@dataclass(frozen=True, slots=True)
class Storage:
    """How one side of a product is stored in memory: a layer's weights, or K and V."""

    # "float32", "bfloat16", or "int8" with a scale per output feature; for K and V also a key of
    # `EIGHT_BITS`, with a scale per layer.
    numbers: str
    dot: bool = False  # bfloat16: multiplied by AVX512_BF16's dot product of pairs
    amx: bool = False  # as `dot`, but panels by the matrix unit

    @property
    def bf16(self) -> bool:
        return self.numbers == "bfloat16"

    @property
    def int8(self) -> bool:
        return self.numbers == "int8"

    @property
    def eight(self) -> bool:
        """Whether numbers are 8-bit floats."""
        return self.numbers in EIGHT_BITS

    @property
    def bytes(self) -> int:
        """Bytes of one number."""
        return {"float32": 4, "bfloat16": 2}.get(self.numbers, 1)

    @property
    def step(self) -> int:
        """Input features in 64 packed bytes of 16 outputs."""
        return 4 // self.bytes

    @property
    def half_bytes(self) -> int:
        """Bytes of a packed step before a panel's second half; int8 has a feature's first."""
        return LANES if self.int8 else 4 * LANES

    @property
    def products(self) -> int:
        """Multiply-adds per step and output: one per feature, or per pair."""
        return 1 if self.dot else self.step

    @property
    def step_bytes(self) -> int:
        """Bytes of the activations that 64 packed bytes are multiplied with."""
        return self.step * (2 if self.dot else 4)
