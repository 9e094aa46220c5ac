"""Compiles kernels in parallel, before the first of them is launched.

Triton compiles a kernel when it is first launched. A start would compile one after another, for
half a second to a second each, while most cores are idle. Only launching tells which kernels a
model needs, so a small rehearsal of the warm-up goes first, in which none of our kernels runs.
Instead, a thread looks for each in Triton's cache on disk, and has another process compile it if it
is not there. Kernels that are known earlier are requested while the model is loaded.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from tgi_trio.shard.torch_backend.compiling.compilers import Compilers, compilers, count_compilers
from tgi_trio.shard.torch_backend.compiling.kernel_keys import hash_compiler, settle_key
from tgi_trio.shard.torch_backend.torch_device import interprets_kernels, runs_kernels

_EMPTY: Final = (torch.empty, torch.empty_like, torch.Tensor.new_empty)
_CACHE_ONLY: Final = ContextVar("cache_only", default=False)  # kernels are not to be compiled

# Stands in for a kernel that is being compiled, so that Triton does not describe it again at every
# launch: a step launches most kernels once a layer, and a description takes 1/7 ms.
_REQUESTED: Final = object()


class ZeroedMemory(TorchFunctionMode):
    """Zeroes new memory: numbers that no kernel has written are then valid indices of any table.

    Not a mode of torch's dispatcher, which would first import torch's compiler for two seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in _EMPTY else out


class _NotCached(Exception):
    """A kernel is not in Triton's cache."""


class _Session:
    """Kernels of a device that are being compiled while more are requested."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[str, Future[None]] = {}
        self._kept: list[tuple[dict[Any, Any], Any]] = []  # Triton's tables, and keys in them
        self._works: dict[Hashable, Callable[[], None]] = {}
        self._stack = ExitStack()
        self._stack.enter_context(_serving_cache_only())
        self._others = self._stack.enter_context(compilers(partial(_target_of, device)))
        self._pool = self._stack.enter_context(ThreadPoolExecutor(count_compilers(), "kernels"))

    def begin(self) -> None:
        """Begin, in threads, the slow parts of looking for the first kernel."""
        self._pool.submit(self._others.begin)
        self._pool.submit(hash_compiler)

    def request(self, work: Callable[[], None]) -> None:
        """Have the kernels compiled that `work` launches in this thread; none of them runs."""
        here = threading.get_ident()

        def take(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
            """Have a kernel compiled; called by Triton, which does so itself if this is False."""
            if threading.get_ident() != here:
                return False
            data = compile["specialization_data"]
            if data not in self._made:
                # Before `_make` is submitted, which puts the kernel there.
                kept = fn.jit_function.device_caches[compile["device"]][0]
                kept[key] = _REQUESTED
                self._kept.append((kept, key))
                made = self._pool.submit(_make, self._device, fn.jit_function, data, self._others)
                self._made[data] = made
            return True

        with _launching_nothing(), _hooked(take), ZeroedMemory():
            work()

    def try_request(self, work: Callable[[], None]) -> None:
        """Do what `request` does; if `work` raises, print that to stderr and drop the rest."""
        try:
            self.request(work)
        except Exception:
            traceback.print_exc()
            print("kernels are compiled where they are launched first: see above", file=sys.stderr)

    def request_early(self, work: Callable[[], None], kind: Hashable) -> None:
        """Do what `request` does for the first `work` of each `kind`, which `finish` launches."""
        if kind not in self._works:
            self._works[kind] = work
            self.request(work)

    def finish(self) -> int:
        """Wait for all kernels and launch the early work; return how many kernels are compiled."""
        self._stack.close()
        for kept, key in self._kept:
            if kept[key] is _REQUESTED:  # compiling it has failed
                del kept[key]
        for work in self._works.values():
            work()
        return sum(future.exception() is None for future in self._made.values())


_BEGUN: Final[dict[torch.device, _Session]] = {}  # from `begin_early` to `compile_ahead`


def compile_ahead(device: torch.device, work: Callable[[], None]) -> int:
    """Compile the kernels that `work` launches; return how many were compiled or found.

    That includes kernels requested since `begin_early`. None of them runs, compiled or not, because
    one may read what another was to write. Torch's own operations do run, on zeroed memory, so the
    results are meaningless. A kernel that cannot be compiled now is compiled at its first launch.
    So are those that `work` has not reached if it raises, which is printed to stderr.
    """
    if not _compiles(device):
        return 0
    session = _BEGUN.pop(device, None) or _Session(device)
    session.try_request(work)
    return session.finish()


def begin_early(device: torch.device) -> None:
    """Begin a session that compiles in the background, until `compile_ahead`."""
    if _compiles(device) and device not in _BEGUN:
        _BEGUN[device] = _Session(device)
        _BEGUN[device].begin()


def rehearse_early(device: torch.device, work: Callable[[], None]) -> None:
    """Have what `work` launches compiled if `begin_early` has been called; see `compile_ahead`."""
    session = _BEGUN.get(device)
    if session is not None:
        session.try_request(work)


def compile_beside(device: torch.device, work: Callable[[], None], kind: Hashable) -> None:
    """Launch `work` at the end of `compile_ahead`, and have its kernels compiled until then.

    Of several with the same `kind`, only the first is launched. If kernels are not compiled ahead,
    `work` is launched at once; if they are interpreted, never.
    """
    session = _BEGUN.get(device)
    if session is not None:
        session.request_early(work, kind)
    elif not interprets_kernels():
        work()


def _compiles(device: torch.device) -> bool:
    """Return whether our kernels run on a device and are compiled, not interpreted."""
    if not runs_kernels(device):
        return False
    from triton import knobs

    return not knobs.runtime.interpret


def _target_of(device: torch.device) -> tuple[Any, ...]:
    """Return the arguments of Triton's `GPUTarget` for a device."""
    from triton.runtime import driver

    with torch.cuda.device(device):
        target = driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


@contextmanager
def _hooked(hook: Callable[..., bool]) -> Iterator[None]:
    """Have Triton call `hook` before it compiles a kernel."""
    from triton import knobs

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Have Triton look up or compile the kernels that are launched, but launch none."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def find(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(function, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = find
    try:
        yield
    finally:
        JITFunction.run = run


@contextmanager
def _serving_cache_only() -> Iterator[None]:
    """Have Triton raise `_NotCached` instead of compiling a kernel, while `_CACHE_ONLY` is set."""
    from triton.compiler import ASTSource

    begin = ASTSource.make_ir

    def begin_or_refuse(source: Any, *args: Any, **kwargs: Any) -> Any:
        if _CACHE_ONLY.get():
            raise _NotCached
        return begin(source, *args, **kwargs)

    ASTSource.make_ir = begin_or_refuse
    try:
        yield
    finally:
        ASTSource.make_ir = begin


def _make(device: torch.device, function: Any, data: str, others: Compilers) -> None:
    """Have a kernel compiled, and load it, as its first launch would."""
    settle_key(function)
    hash_compiler()
    with torch.cuda.device(device):
        kernel = _find(function, data)
        if kernel is None:
            others.compile(data)  # into Triton's cache; if that fails, `preload` compiles it
            kernel = function.preload(data)
        if kernel is not None:
            _ = kernel.run  # reading this makes Triton build the kernel's launcher


def _find(function: Any, data: str) -> Any:
    """Return a kernel from Triton's cache, None if it is not there."""
    token = _CACHE_ONLY.set(True)
    try:
        return function.preload(data)
    except _NotCached:
        return None
    finally:
        _CACHE_ONLY.reset(token)
