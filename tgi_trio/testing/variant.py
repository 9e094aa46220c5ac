"""A kernel as it is launched: types of its arguments, constants, warps and the like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

TYPES: Final[dict[torch.dtype, str]] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}
F32, BF16, F64, I32, I64, F16, U8, I8, E4M3 = TYPES
EVEN: Final = ", a multiple of 16"  # behind the type of a whole number that is


@dataclass(frozen=True)
class Variant:
    """A kernel as it is launched: types of its arguments, in order, and its constants.

    Whole numbers and fractions are strings, those that Triton knows more of with `EVEN` behind.
    """

    name: str
    kernel: Any
    arguments: tuple[torch.dtype | str, ...]  # a dtype: a pointer to such numbers
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    registers: int | None = None  # of a thread, at most; None: as the assembler likes
