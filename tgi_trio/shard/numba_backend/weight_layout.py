"""How numbers lie in memory: what packing writes and the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.model.kernel_fit import LANES as LANES
from tgi_trio.model.kernel_fit import PANEL as PANEL


@dataclass(frozen=True, slots=True)
class Storage:
    """How one side of a product lies in memory: a layer's weights, or K and V."""

    numbers: str  # "float32", "bfloat16", or "int8" with a scale per output feature
    dot: bool = False  # bfloat16: multiplied by AVX512_BF16's dot product of pairs

    @property
    def bf16(self) -> bool:
        return self.numbers == "bfloat16"

    @property
    def int8(self) -> bool:
        return self.numbers == "int8"

    @property
    def bytes(self) -> int:
        """Of one number."""
        return {"float32": 4, "bfloat16": 2, "int8": 1}[self.numbers]

    @property
    def step(self) -> int:
        """Input features for which 64 packed bytes hold 16 outputs."""
        return 4 // self.bytes

    @property
    def products(self) -> int:
        """Multiply-adds per step and output: one per feature, or per pair."""
        return 1 if self.dot else self.step

    @property
    def step_bytes(self) -> int:
        """Bytes of the activations that 64 packed bytes are multiplied with."""
        return self.step * (2 if self.dot else 4)
