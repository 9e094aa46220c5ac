"""Kernels compiled beside one another, before the first of them is launched.

A start compiles a kernel where it is first launched, one after another, for half a second to a
second each, while most cores have nothing to do. What will be launched is known by launching it
alone: so a small warm-up goes first, in which none of our kernels runs. Each is looked for in
Triton's cache by a thread instead, and compiled by another process where it is not there. What is
known before that is asked for while the model is loaded.
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
from tgi_trio.shard.torch_backend.compiling.kernel_keys import settle_key, sum_compiler
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

_EMPTY: Final = (torch.empty, torch.empty_like, torch.Tensor.new_empty)
_LOOKS: Final = ContextVar("looks", default=False)  # for a kernel that has been compiled already

# Kept in place of a kernel that is being compiled, so that Triton describes no other launch of it:
# a step launches most kernels once a layer, and that takes it a seventh of a millisecond.
_ASKED_FOR: Final = object()


class ZeroedMemory(TorchFunctionMode):
    """Memory that is taken is zero: what no kernel has written is an index within any table.

    Not a mode of torch's dispatcher, which imports its compiler first: two seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in _EMPTY else out


class _NotKept(Exception):
    """A kernel is not in Triton's cache."""


class _Session:
    """Kernels of a device that are being compiled while others are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[str, Future[None]] = {}
        self._kept: list[tuple[dict[Any, Any], Any]] = []  # where Triton keeps them, and by what
        self._works: dict[Hashable, Callable[[], None]] = {}
        self._stack = ExitStack()
        self._stack.enter_context(_looking())
        self._others = self._stack.enter_context(compilers(partial(_target_of, device)))
        self._pool = self._stack.enter_context(ThreadPoolExecutor(count_compilers(), "kernels"))

    def begin(self) -> None:
        """Do beside what comes next what takes long of looking for the first kernel."""
        self._pool.submit(self._others.begin)
        self._pool.submit(sum_compiler)

    def ask(self, work: Callable[[], None]) -> None:
        """Have compiled what `work` launches, which is launched by this thread and does not run."""
        here = threading.get_ident()

        def take(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
            """Have a kernel compiled; called by Triton, which does not do it if that is true."""
            if threading.get_ident() != here:
                return False
            data = compile["specialization_data"]
            if data not in self._made:
                # Before it is made, which puts the kernel there.
                kept = fn.jit_function.device_caches[compile["device"]][0]
                kept[key] = _ASKED_FOR
                self._kept.append((kept, key))
                made = self._pool.submit(_make, self._device, fn.jit_function, data, self._others)
                self._made[data] = made
            return True

        with _launching_nothing(), _asking(take), ZeroedMemory():
            work()

    def try_asking(self, work: Callable[[], None]) -> None:
        """Do what `ask` does, but where `work` raises, which is told to stderr, for the rest."""
        try:
            self.ask(work)
        except Exception:
            traceback.print_exc()
            print("kernels are compiled where they are launched first: see above", file=sys.stderr)

    def ask_early(self, work: Callable[[], None], kind: Hashable) -> None:
        """Ask for what `work` launches unless another has its `kind`; `finish` launches it."""
        if kind not in self._works:
            self._works[kind] = work
            self.ask(work)

    def finish(self) -> int:
        """Wait for all kernels, return how many there are, and launch what was asked for early."""
        self._stack.close()
        for kept, key in self._kept:
            if kept[key] is _ASKED_FOR:  # it does not compile
                del kept[key]
        for work in self._works.values():
            work()
        return sum(future.exception() is None for future in self._made.values())


_BEGUN: Final[dict[torch.device, _Session]] = {}  # by `begin_early`, until `compile_ahead`


def compile_ahead(device: torch.device, work: Callable[[], None]) -> int:
    """Compile what `work` launches; return how many kernels that were.

    Those included that have been asked for since `begin_early`. None of them runs, compiled or not:
    what one reads, another would have had to write. What torch computes is computed, of memory that
    holds zeros: nobody may look at what comes out. A kernel that does not compile is left for where
    it is launched, and so is what `work` has not come to where it raises, which is told to stderr.
    """
    if not _compiles(device):
        return 0
    session = _BEGUN.pop(device, None) or _Session(device)
    session.try_asking(work)
    return session.finish()


def begin_early(device: torch.device) -> None:
    """Begin to compile beside what comes next, up to `compile_ahead`."""
    if _compiles(device) and device not in _BEGUN:
        _BEGUN[device] = _Session(device)
        _BEGUN[device].begin()


def rehearse_early(device: torch.device, work: Callable[[], None]) -> None:
    """Have compiled what `work` launches, if `begin_early` has been called; see `compile_ahead`."""
    session = _BEGUN.get(device)
    if session is not None:
        session.try_asking(work)


def compile_beside(device: torch.device, work: Callable[[], None], kind: Hashable) -> None:
    """Launch `work` behind `compile_ahead`, and have what it launches compiled until then.

    It is done at once where kernels are not compiled ahead, and once for all of its `kind` where
    they are.
    """
    session = _BEGUN.get(device)
    if session is None:
        work()
    else:
        session.ask_early(work, kind)


def _compiles(device: torch.device) -> bool:
    """Return whether our kernels are compiled here, and not interpreted."""
    if not runs_kernels(device):
        return False
    from triton import knobs

    return not knobs.runtime.interpret


def _target_of(device: torch.device) -> tuple[Any, ...]:
    """Return what Triton compiles for, in the words of its `GPUTarget`."""
    from triton.runtime import driver

    with torch.cuda.device(device):
        target = driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


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


@contextmanager
def _looking() -> Iterator[None]:
    """Have Triton raise `_NotKept` where it is to compile a kernel, while `_LOOKS`."""
    from triton.compiler import ASTSource

    begin = ASTSource.make_ir

    def begin_or_refuse(source: Any, *args: Any, **kwargs: Any) -> Any:
        if _LOOKS.get():
            raise _NotKept
        return begin(source, *args, **kwargs)

    ASTSource.make_ir = begin_or_refuse
    try:
        yield
    finally:
        ASTSource.make_ir = begin


def _make(device: torch.device, function: Any, data: str, others: Compilers) -> None:
    """Have a kernel compiled and load it, as its first launch would."""
    settle_key(function)
    sum_compiler()
    with torch.cuda.device(device):
        kernel = _find(function, data)
        if kernel is None:
            others.compile(data)  # into Triton's cache; else it is compiled here
            kernel = function.preload(data)
        if kernel is not None:
            _ = kernel.run  # what launches it is made when it is looked at


def _find(function: Any, data: str) -> Any:
    """Return a kernel from Triton's cache, None where it is not there."""
    token = _LOOKS.set(True)
    try:
        return function.preload(data)
    except _NotKept:
        return None
    finally:
        _LOOKS.reset(token)
