"""Compilation on a second core: numba compiles one kernel at a time in a process.

The very first start compiles a step's kernels and the sampler's, some seconds each. The sampler's
are left to a process of their own meanwhile, which puts them into the cache where ours finds them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tgi_trio.ipc.parent import die_with_parent
from tgi_trio.shard.machine.cores import usable_cores
from tgi_trio.shard.numba_backend.kernels import is_missing

_PATIENCE_S = 60.0  # for what is left of it at the end; after that we compile ourselves


@contextmanager
def compile_in_parallel(kernel: Callable[..., Any], module: str) -> Iterator[None]:
    """Run `python -m module`, which compiles `kernel`, during the block; wait for it at its end.

    Nothing is run where the kernel is in the cache, there is no cache, or no second core. How it
    ends is of no interest: whoever calls the kernel compiles what is missing. Main thread only.
    """
    if not is_missing(kernel) or len(usable_cores()) < 2:
        yield
        return
    with _run_beside([sys.executable, "-m", module]) as process:
        yield
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            print(f"{module} has not ended in {_PATIENCE_S:g} s more", file=sys.stderr)


@contextmanager
def _run_beside(argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that ends with the block, or with us."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
