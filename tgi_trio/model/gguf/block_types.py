"""The types of a GGUF file's tensors: the weights in a block, and its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type; a row of a tensor is whole blocks."""

    name: str
    weights: int  # of a block
    bytes: int
    scales: tuple[int, ...] = ()  # offsets in a block of the numbers that scale it
    scale: str = "F16"  # their type

    @property
    def plain(self) -> bool:
        """Whether a block is one unquantised number."""
        return self.weights == 1


# By the number in a file.
SERVED: Final = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18, (0,)),
    3: BlockType("Q4_1", 32, 20, (0, 2)),
    6: BlockType("Q5_0", 32, 22, (0,)),
    7: BlockType("Q5_1", 32, 24, (0, 2)),
    8: BlockType("Q8_0", 32, 34, (0,)),
    10: BlockType("Q2_K", 256, 84, (80, 82)),
    11: BlockType("Q3_K", 256, 110, (108,)),
    12: BlockType("Q4_K", 256, 144, (0, 2)),
    13: BlockType("Q5_K", 256, 176, (0, 2)),
    14: BlockType("Q6_K", 256, 210, (208,)),
    15: BlockType("Q8_K", 256, 292, (0,), "F32"),
    20: BlockType("IQ4_NL", 32, 18, (0,)),
    23: BlockType("IQ4_XS", 256, 136, (0,)),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54, (52,)),
    35: BlockType("TQ2_0", 256, 66, (64,)),
    39: BlockType("MXFP4", 32, 17, (0,), "F8_E8M0"),
}
TABLES: Final = {26: BlockType("I32", 1, 4)}  # of whole numbers, which are no weights
BY_NAME: Final = {kind.name: kind for kind in SERVED.values()}

# Unsupported types, for the error message only.
_OTHERS: Final = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 27: "I64", 28: "F64", 29: "IQ1_M",
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "I2_S of bitnet.cpp", 40: "NVFP4",
}  # fmt: skip


def find_type(number: int) -> BlockType:
    """Return a type by its number; raises ValueError with its name for one that is not read."""
    if found := SERVED.get(number) or TABLES.get(number):
        return found
    name = _OTHERS.get(number, f"number {number}")
    raise ValueError(
        f"a type that is not read here, {name}; read are {', '.join(BY_NAME)}. Take a file of the "
        "model in one of them, such as Q4_K_M"
    )


def has_scales(name: str) -> bool:
    """Return whether this is a type of blocks with scales; False for other containers' types."""
    return name in BY_NAME and bool(BY_NAME[name].scales)
