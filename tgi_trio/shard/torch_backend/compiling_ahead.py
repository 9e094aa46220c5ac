"""Kernels compiled beside one another, before the first of them is launched.

A start compiles a kernel where it is first launched, one after another, for half a second to a
second each, while most cores have nothing to do. What will be launched is known by launching it
alone: so a small warm-up goes first, in which none of our kernels runs. Each is compiled by a
thread instead: compilers let each other run, most of the time.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tgi_trio.shard.torch_backend.torch_device import runs_kernels

_MOST_THREADS: Final = 16
_EMPTY: Final = ("aten::empty", "aten::new_empty")


class ZeroedMemory(TorchDispatchMode):
    """Memory that is taken is zero: what no kernel has written is an index within any table."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name.startswith(_EMPTY):
            out.zero_()
        return out


def compile_ahead(device: torch.device, work: Callable[[], None]) -> int:
    """Compile what `work` launches; return how many kernels that were.

    None of them runs, compiled or not: what one reads, another would have had to write. What torch
    computes is computed, of memory that holds zeros: nobody may look at what comes out. A kernel
    that does not compile is left for where it is launched, and so are all where `work` raises,
    which is told to stderr.
    """
    if not _compiles(device):
        return 0
    made: dict[str, Future[None]] = {}
    here = threading.get_ident()
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:

        def take(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
            """Have a kernel compiled; called by Triton, which does not do it if that is true."""
            if threading.get_ident() != here:
                return False
            data = compile["specialization_data"]
            if data not in made:
                made[data] = pool.submit(_make, device, fn.jit_function, data)
            return True

        try:
            with _launching_nothing(), _asking(take), ZeroedMemory():
                work()
        except Exception:
            traceback.print_exc()
            print("kernels are compiled where they are launched first: see above", file=sys.stderr)
            return 0
    return sum(future.exception() is None for future in made.values())


def _compiles(device: torch.device) -> bool:
    """Return whether our kernels are compiled here, and not interpreted."""
    if not runs_kernels(device):
        return False
    from triton import knobs

    return not knobs.runtime.interpret


@contextmanager
def _asking(hook: Callable[..., bool]) -> Iterator[None]:
    """Have Triton call `hook` before it compiles anything."""
    from triton import knobs

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Have Triton look for the kernels that are launched, and launch none."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def find(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(function, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = find
    try:
        yield
    finally:
        JITFunction.run = run


def _make(device: torch.device, function: Any, data: str) -> None:
    """Compile a kernel and load it, as its first launch would."""
    with torch.cuda.device(device):
        kernel = function.preload(data)
        if kernel is not None:
            _ = kernel.run  # what launches it is made when it is looked at
