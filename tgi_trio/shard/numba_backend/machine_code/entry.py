"""Kernels that are compiled on their own: which there are, and how one is opened.

A kernel takes whole numbers alone, addresses most of them. Which instructions it is made of is
*chosen* when it is compiled (`Variant`, `Multiplier`). numba is imported where nothing is kept.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

from tgi_trio.shard.numba_backend.machine_code.opening import (
    SYMBOL,
    MachineCode,
    file_name,
    open_object,
)
from tgi_trio.shard.numba_backend.machine_code.store import find_or_make, is_kept, make_alone
from tgi_trio.shard.numba_backend.multiplier import Multiplier
from tgi_trio.shard.numba_backend.variant import Variant

Choice: TypeAlias = Variant | Multiplier | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel of `kernels/` that others call, Python or a kernel that has its address."""

    module: str  # below `kernels`
    function: str
    integers: int  # arguments, but for what is chosen

    def open(self, choice: Choice = None) -> MachineCode:
        """Return the kernel as it is chosen, compiled where it is not kept.

        It stays as long as the process: tables of operations hold its address. Raises what the
        compiler raises without instructions for it.
        """
        return _open(self, choice)

    def is_kept(self, choice: Choice = None) -> bool:
        """Return whether nothing would be compiled; a look at the name of a file."""
        return is_kept(self.file_name(choice))

    def compile_alone(self, choice: Choice) -> None:
        """Compile and keep it, unless it is kept or another process is at it; raises as `open`."""
        make_alone(self.file_name(choice), lambda: self.compile(choice))

    def compile(self, choice: Choice) -> bytes:
        """Return the object file; raises as `open`."""
        from tgi_trio.shard.numba_backend.kernels.compiling import compile_object

        return compile_object(self.module, self.function, self.integers, choice, SYMBOL)

    def file_name(self, choice: Choice) -> str:
        """Return the name of what is kept."""
        return file_name(f"{self.module}.{self.function}", choice)


@cache
def _open(entry: Entry, choice: Choice) -> MachineCode:
    data = find_or_make(entry.file_name(choice), lambda: entry.compile(choice))
    # numba's functions take a place for the result and one for an exception, which none of ours
    # has; then whatever is chosen, which is nothing.
    return open_object(data, entry.integers, _places(choice is not None))


def _places(chosen: bool) -> tuple[Any, ...]:
    result, problem = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
    return (result, problem, None) if chosen else (result, problem)


TAKE_PART: Final = Entry("step", "take_part", 4)
MULTIPLY_PANEL: Final = Entry("quantised.panels", "multiply_panel", 10)
SHRINK: Final = Entry("adapters", "shrink", 11)
EXPAND: Final = Entry("adapters", "expand", 11)
WORK_ON_ROWS: Final = Entry("sampling.rows", "work_on_rows", 4)
DRAW_UNIFORMS: Final = Entry("sampling.draws", "draw_uniforms", 4)
SHUFFLE: Final = Entry("sampling.shuffle", "shuffle", 4)
# What a step calls by its address; see `kernels/apart.py`.
MIX_EXPERTS: Final = Entry("mixture.mixing", "mix_experts", 5)
RUN_RARE: Final = Entry("rare", "run_rare", 5)
RUN_STREAMS: Final = Entry("streams", "run_streams", 5)
RUN_PADDING: Final = Entry("padding", "run_padding", 5)
RUN_LATENTS: Final = Entry("latents", "run_latents", 5)
KEEP_STATES: Final = Entry("states.keeping", "keep_states", 5)
