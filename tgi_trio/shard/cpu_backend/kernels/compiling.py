"""Writes a kernel with all that it calls as a module of LLVM."""

from __future__ import annotations

from typing import Any

from tgi_trio.shard.cpu_backend.kernels.compiler.program import Program
from tgi_trio.shard.cpu_backend.kernels.compiler.types import Kernel
from tgi_trio.shard.cpu_backend.kernels.quantised.multiplier import MultiplierType
from tgi_trio.shard.cpu_backend.kernels.variant import VariantType
from tgi_trio.shard.cpu_backend.variant import Variant


def write_module(kernel: Kernel, integers: int, choice: Any, symbol: str) -> str:
    """Return the module of a kernel of so many integers; the function is named `symbol`.

    `choice`: the variant or multiplier, or None. Raises KernelError for what cannot be compiled.
    """
    chosen = []
    if choice is not None:
        chosen = [(VariantType if isinstance(choice, Variant) else MultiplierType)(choice)]
    program = Program()
    program.add_entry(kernel, chosen, integers, symbol)
    return str(program.module)
