"""The operations that are compiled apart from the step: by what, and what shows that they work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tgi_trio.shard.numba_backend import (
    latent_self_test,
    mixture_self_test,
    padding_self_test,
    rare_self_test,
    state_self_test,
    stream_self_test,
)
from tgi_trio.shard.numba_backend.kernels.apart import compile_apart
from tgi_trio.shard.numba_backend.kernels.padding import run_padding
from tgi_trio.shard.numba_backend.kernels.rare import run_rare
from tgi_trio.shard.numba_backend.kernels.streams import run_streams
from tgi_trio.shard.numba_backend.program import Program
from tgi_trio.shard.numba_backend.tables import (
    KEEPING,
    MIXING,
    OF_LATENTS,
    OF_PADDING,
    RARE,
    STREAMING,
    Code,
)
from tgi_trio.shard.numba_backend.variant import Variant


def _no_words(variant: Variant) -> list[str]:
    return []


@dataclass(frozen=True, slots=True)
class Apart:
    """Operations that one entry computes, for the models that have any of them.

    `compile` returns the entry's address; it and `find_fault`, which says what is wrong with it,
    raise what the compiler raises. `words`: what `python -m` gets to compile it beside the step's
    kernels; none where the cache has it, or where that is not worth a process.
    """

    kernels: str  # what a refusal calls them
    codes: tuple[Code, ...]
    compile: Callable[[Variant], int]
    find_fault: Callable[[Variant], str | None]
    words: Callable[[Variant], list[str]] = _no_words


MIXTURES: Final = Apart(
    "kernels of mixtures",
    MIXING,
    mixture_self_test.compile_mixtures,
    mixture_self_test.find_fault,
    mixture_self_test.words,
)
OF_FEW: Final = Apart("kernels", RARE, partial(compile_apart, run_rare), rare_self_test.find_fault)
STREAMS: Final = Apart(
    "kernels of hidden states",
    STREAMING,
    partial(compile_apart, run_streams),
    stream_self_test.find_fault,
)
NARROW_HEADS: Final = Apart(
    "kernels of narrow heads",
    OF_PADDING,
    partial(compile_apart, run_padding),
    padding_self_test.find_fault,
)
LATENTS: Final = Apart(
    "kernels of latents", OF_LATENTS, latent_self_test.compile_latents, latent_self_test.find_fault
)
STATES: Final = Apart(
    "kernels of states",
    KEEPING,
    state_self_test.compile_states,
    state_self_test.find_fault,
    state_self_test.words,
)
_TABLE: Final = (MIXTURES, OF_FEW, STREAMS, NARROW_HEADS, LATENTS, STATES)


def find_apart(program: Program) -> list[Apart]:
    """Return those that a program has operations of."""
    return [each for each in _TABLE if program.has(each.codes)]
