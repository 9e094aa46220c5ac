"""Kernels that begin before the preceding one has ended: programmatic dependent launch.

From compute capability 9.0 on, NVIDIA only. A kernel launched like this (`launch_pdl`) begins once
every program of the preceding kernel has called `let_next_begin` or has ended. Before
`wait_for_earlier` it may use only what no kernel is still writing: weights, and the inputs of the
step. These have been written before the step's embedding, which is a kernel that is launched
normally, or one that waits before it lets the next begin (`beginning.py`). For lists that are made
during the step, `attention/paged/tiling.py` launches such a kernel. After the wait all earlier
kernels have ended, since each has waited itself, and what they wrote is visible.

A kernel must not overwrite what an earlier one may still read. So it writes only after its wait,
and all of its programs wait, even those that find nothing to do. The sampler's inputs are copied
before the step or, for a choice that is made later, before that choice; a copy waits for all
kernels before it, and all after it wait for the copy. Inputs that depend on drafts are corrected
before the embedding. A recording begins when the one before it has ended completely.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """Let the next kernel begin, in whatever room is left on the multiprocessors."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_earlier(OVERLAPS: tl.constexpr):
    """Wait until all earlier kernels have ended."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def fetch(at):
    """Prefetch what pointers point to into the level 2 cache; only where launches overlap.

    All multiprocessors share that cache, so what an earlier kernel still writes is visible there.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
