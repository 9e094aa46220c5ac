"""The compiled kernels: everything here runs without the interpreter, on raw addresses.

`variant.py` has the compile-time choices as types. `emit.py`, `vectors.py` and `tiles.py` add
operations that Python lacks, `threads.py` those of the team. The other files are the kernels, one
per part of a step; `step.py` is the entry. `compiler/` makes LLVM's instructions of them, and
`compiling.py` object files of the entries that `machine_code/entry.py` lists; nothing else imports
this room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tgi_trio.shard.cpu_backend.kernels.compiler.types import Kernel


def kernel(function: Callable[..., Any]) -> Any:
    """Have a function called by other kernels."""
    return Kernel(function)


def entry(function: Callable[..., Any]) -> Any:
    """Have a function of integers called through `machine_code/`."""
    return Kernel(function)
