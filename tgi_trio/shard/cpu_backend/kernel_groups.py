"""The operations that are compiled apart from the step, with their compilers and self-tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tgi_trio.shard.cpu_backend.machine_code.entry import (
    KEEP_STATES,
    MIX_EXPERTS,
    RUN_BLOCKS,
    RUN_GATED,
    RUN_HYPER,
    RUN_INDEX,
    RUN_LATENTS,
    RUN_MIXED,
    RUN_NGRAMS,
    RUN_PADDING,
    RUN_POOLED,
    RUN_RARE,
    RUN_STREAMS,
    RUN_TURNS,
    Entry,
)
from tgi_trio.shard.cpu_backend.program import Program
from tgi_trio.shard.cpu_backend.self_tests import blocks as block_self_test
from tgi_trio.shard.cpu_backend.self_tests import gated as gated_self_test
from tgi_trio.shard.cpu_backend.self_tests import hyper as hyper_self_test
from tgi_trio.shard.cpu_backend.self_tests import index as index_self_test
from tgi_trio.shard.cpu_backend.self_tests import latents as latent_self_test
from tgi_trio.shard.cpu_backend.self_tests import mixed as mixed_self_test
from tgi_trio.shard.cpu_backend.self_tests import mixtures as mixture_self_test
from tgi_trio.shard.cpu_backend.self_tests import ngrams as ngrams_self_test
from tgi_trio.shard.cpu_backend.self_tests import padding as padding_self_test
from tgi_trio.shard.cpu_backend.self_tests import pooled as pooled_self_test
from tgi_trio.shard.cpu_backend.self_tests import rare as rare_self_test
from tgi_trio.shard.cpu_backend.self_tests import states as state_self_test
from tgi_trio.shard.cpu_backend.self_tests import streams as stream_self_test
from tgi_trio.shard.cpu_backend.self_tests import turns as turn_self_test
from tgi_trio.shard.cpu_backend.tables import (
    KEEPING,
    MIXING,
    OF_BLOCKS,
    OF_GATED,
    OF_HYPER,
    OF_INDEX,
    OF_LATENTS,
    OF_MIXED,
    OF_NGRAMS,
    OF_PADDING,
    OF_POOLED,
    RARE,
    STREAMING,
    TURNING,
    Code,
)
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """A group of operations that one entry computes, for models that have any of them.

    `choose` derives the entry's variant from the step's. `find_fault` returns what is wrong with
    it, and raises what the compiler raises.
    """

    kernels: str  # the kernels' name in error messages
    codes: tuple[Code, ...]
    entry: Entry
    find_fault: Callable[[Variant], str | None]
    choose: Callable[[Variant], Variant] = narrowed

    def open(self, variant: Variant) -> int:
        """Return the entry's address; raises what the compiler raises."""
        return self.entry.open(self.choose(variant)).address


MIXTURES: Final = KernelGroup(
    "kernels of mixtures", MIXING, MIX_EXPERTS, mixture_self_test.find_fault
)
OF_FEW: Final = KernelGroup("kernels", RARE, RUN_RARE, rare_self_test.find_fault)
STREAMS: Final = KernelGroup(
    "kernels of hidden states", STREAMING, RUN_STREAMS, stream_self_test.find_fault
)
HYPER: Final = KernelGroup(
    "kernels of hyper-connections", OF_HYPER, RUN_HYPER, hyper_self_test.find_fault
)
NARROW_HEADS: Final = KernelGroup(
    "kernels of narrow heads", OF_PADDING, RUN_PADDING, padding_self_test.find_fault
)
TURNS: Final = KernelGroup("kernels of EXL3's turns", TURNING, RUN_TURNS, turn_self_test.find_fault)
LATENTS: Final = KernelGroup(
    "kernels of latents",
    OF_LATENTS,
    RUN_LATENTS,
    latent_self_test.find_fault,
    latent_self_test.of_latents,
)
INDEX: Final = KernelGroup(
    "kernels of an index",
    OF_INDEX,
    RUN_INDEX,
    index_self_test.find_fault,
    index_self_test.of_index,
)
BLOCKS: Final = KernelGroup(
    "kernels of an index of blocks",
    OF_BLOCKS,
    RUN_BLOCKS,
    block_self_test.find_fault,
    index_self_test.of_index,
)
GATED: Final = KernelGroup(
    "kernels of gated states", OF_GATED, RUN_GATED, gated_self_test.find_fault
)
NGRAMS: Final = KernelGroup(
    "kernels of n-grams", OF_NGRAMS, RUN_NGRAMS, ngrams_self_test.find_fault
)
MIXED: Final = KernelGroup(
    "kernels of mixed states", OF_MIXED, RUN_MIXED, mixed_self_test.find_fault
)
POOLED: Final = KernelGroup(
    "kernels of an index of pooled keys",
    OF_POOLED,
    RUN_POOLED,
    pooled_self_test.find_fault,
    index_self_test.of_index,
)
STATES: Final = KernelGroup(
    "kernels of states",
    KEEPING,
    KEEP_STATES,
    state_self_test.find_fault,
    state_self_test.of_states,
)
_TABLE: Final = (
    *(MIXTURES, OF_FEW, STREAMS, HYPER, NARROW_HEADS, TURNS, LATENTS, INDEX, BLOCKS, STATES),
    *(GATED, MIXED, NGRAMS, POOLED),
)


def find_kernel_groups(program: Program) -> list[KernelGroup]:
    """Return the groups of which a program has operations."""
    return [each for each in _TABLE if program.has(each.codes)]
