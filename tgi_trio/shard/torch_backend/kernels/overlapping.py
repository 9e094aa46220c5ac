"""Kernels that begin before the one before them has ended ("programmatic dependent launch").

From compute capability 9.0 on, NVIDIA's alone. A kernel that is launched so (`launch_pdl`) begins
once every program of the one before it has called `let_next_begin`, or ended. What it does before
`wait_for_earlier` it may do with what no kernel writes: weights, and what a step is told, which
lies there before its embedding: a kernel that is launched as others are, or that lets none begin
before it has waited (`beginning.py`). Of what a step lists on its way, `attention/tiling.py` sees
to such a one. Behind it all earlier kernels have ended, as each of them has waited itself, and what
they wrote is seen.

So nothing is written that an earlier kernel may still read: all that a kernel writes it writes
behind its wait, and every program of it waits, those that find nothing to do as well. What rows ask
of the sampler comes in copies, before the step or, of a choice that follows later, before that; a
copy waits for all kernels before it, and all behind it wait for the copy. What guesses change of it
they change before the embedding. A recording begins when the one before it has ended altogether.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """Let the kernel behind this one begin: it takes the room that is left."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_earlier(OVERLAPS: tl.constexpr):
    """Wait until all earlier kernels have ended."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def fetch(at):
    """Have what lies at pointers brought to the cache of level 2; only where kernels overlap.

    That cache all multiprocessors share: what a kernel before this one still writes is seen there.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
