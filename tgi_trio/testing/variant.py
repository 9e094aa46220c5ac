"""A variant of a kernel: the types of its arguments, its constants, warps and the like."""

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
EVEN: Final = ", a multiple of 16"  # suffix of the type of such an integer


@dataclass(frozen=True)
class Variant:
    """A kernel, the types of its arguments in order, and its constants.

    The types of scalars are strings; those of multiples of 16, which Triton specialises for, end
    with `EVEN`.
    """

    name: str
    kernel: Any
    arguments: tuple[torch.dtype | str, ...]  # a dtype: a pointer to such numbers
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    registers: int | None = None  # most of a thread; None: as the assembler chooses
