"""The entries: kernels that are compiled on their own, and how one is loaded.

A kernel takes only integers, most of which are addresses. A compile-time choice (`Variant`,
`Multiplier`) decides which instructions it uses. Kernels and their compiler are imported only if
something has to be compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, TypeAlias

from tgi_trio.shard.cpu_backend.machine_code.object_files import (
    SYMBOL,
    MachineCode,
    file_name,
    open_object,
)
from tgi_trio.shard.cpu_backend.machine_code.store import (
    find_or_make,
    find_or_make_shared,
    is_kept,
    make_alone,
)
from tgi_trio.shard.cpu_backend.multiplier import Multiplier, Way
from tgi_trio.shard.cpu_backend.variant import Variant

Choice: TypeAlias = Variant | Multiplier | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel in `kernels/` that is called from Python, or by a kernel through its address."""

    module: str  # below `kernels`
    function: str
    integers: int  # number of arguments, without the choice

    def open(self, choice: Choice = None) -> MachineCode:
        """Return the kernel for a choice, compiled if it is not in the store.

        It stays loaded for the life of the process, since tables of operations hold its address.
        Raises what the compiler raises for lack of instructions.
        """
        with _OPENING:
            return _open(self, choice)

    def is_kept(self, choice: Choice = None) -> bool:
        """Return whether it is in the store; only looks for the file."""
        return is_kept(self.file_name(choice))

    def compile_alone(self, choice: Choice) -> None:
        """Compile and store it, unless it is stored or being compiled; raises as `open`."""
        make_alone(self.file_name(choice), lambda: self.compile(choice))

    def compile(self, choice: Choice) -> bytes:
        """Return the object file; raises as `open`.

        Where another version of the sources came to the same instructions, its file is taken.
        """
        from tgi_trio.shard.cpu_backend.machine_code.making import make_optimised, origin_of

        name = f"tgi_trio.shard.cpu_backend.kernels.{self.module}"
        kernel = getattr(import_module(name), self.function)
        text = _write(kernel, self.integers, choice)
        return find_or_make_shared(origin_of(text), lambda: make_optimised(text))

    def file_name(self, choice: Choice) -> str:
        """Return the name of its file in the store."""
        return file_name(f"{self.module}.{self.function}", choice)


def open_kernel(kernel: Any, integers: int, choice: Choice = None) -> MachineCode:
    """Return a kernel that is no entry as a function of so many int64; it is not kept.

    Raises what the compiler raises.
    """
    from tgi_trio.shard.cpu_backend.machine_code.making import make_optimised

    return open_object(make_optimised(_write(kernel, integers, choice)), integers)


def _write(kernel: Any, integers: int, choice: Choice) -> str:
    from tgi_trio.shard.cpu_backend.kernels.compiling import write_module

    return write_module(kernel, integers, choice, SYMBOL)


# Threads that open a kernel at the same time would each load it, and the cache would keep one: the
# others' code would be freed while tables of operations have its address.
_OPENING: Final = threading.Lock()


@cache
def _open(entry: Entry, choice: Choice) -> MachineCode:
    data = find_or_make(entry.file_name(choice), lambda: entry.compile(choice))
    return open_object(data, entry.integers)


TAKE_PART: Final = Entry("step", "take_part", 4)
SHRINK: Final = Entry("adapters", "shrink", 11)
EXPAND: Final = Entry("adapters", "expand", 11)
WORK_ON_ROWS: Final = Entry("sampling.rows", "work_on_rows", 4)
DRAW_UNIFORMS: Final = Entry("sampling.draws", "draw_uniforms", 4)
SHUFFLE: Final = Entry("sampling.shuffle", "shuffle", 4)
# How panels of quantised weights are multiplied, called by a step through their addresses.
WAYS: Final[Mapping[Way, Entry]] = {
    "vectors": Entry("quantised.panels", "multiply_by_vectors", 10),
    "codes": Entry("quantised.matrix", "multiply_codes", 10),
    "pairs": Entry("quantised.pairs", "multiply_as_pairs", 10),
    "digits": Entry("quantised.digits", "multiply_digits", 10),
}
# Called by a step through their addresses; see `kernels/linked_calls.py`.
MIX_EXPERTS: Final = Entry("mixture.mixing", "mix_experts", 5)
RUN_RARE: Final = Entry("rare", "run_rare", 5)
RUN_STREAMS: Final = Entry("streams", "run_streams", 5)
RUN_PADDING: Final = Entry("padding", "run_padding", 5)
RUN_TURNS: Final = Entry("turns", "run_turns", 5)
RUN_LATENTS: Final = Entry("latents", "run_latents", 5)
RUN_HYPER: Final = Entry("hyper", "run_hyper", 5)
RUN_INDEX: Final = Entry("index.choosing", "run_index", 5)
RUN_BLOCKS: Final = Entry("blocks.choosing", "run_blocks", 5)
RUN_POOLED: Final = Entry("pooled.choosing", "run_pooled", 5)
RUN_GATED: Final = Entry("gated", "run_gated", 5)
RUN_MIXED: Final = Entry("mixed", "run_mixed", 5)
RUN_NGRAMS: Final = Entry("ngrams", "run_ngrams", 5)
KEEP_STATES: Final = Entry("states.keeping", "keep_states", 5)
