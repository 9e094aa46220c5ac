"""Compiles a kernel to an object file that can be loaded without numba."""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

from numba import typeof, types

from tgi_trio.shard.numba_backend.kernels.object_symbols import missing_symbols


def compile_object(module: str, function: str, integers: int, choice: Any, symbol: str) -> bytes:
    """Return the object file of an entry of `kernels.module`; its symbol is named `symbol`.

    `choice`: the variant, or None. Raises what the compiler raises for lack of instructions, and
    RuntimeError for code that calls symbols which only processes with numba have.
    """
    # The import registers numba's types of the choices, too.
    entry = getattr(import_module(f"{__package__}.{module}"), function)
    chosen = () if choice is None else (typeof(choice),)
    signature = (*chosen, *[types.int64] * integers)
    entry.compile(signature)
    made = entry.overloads[signature]
    data: bytes = made.library.emit_object(made.fndesc.llvm_func_name, symbol)
    process = ctypes.CDLL(None)
    if strange := [name for name in missing_symbols(data) if not hasattr(process, name)]:
        raise RuntimeError(f"{function} calls what is not there: {', '.join(strange)}")
    return data
