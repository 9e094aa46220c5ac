"""Processes that start beside each other with an empty cache: one of them compiles a kernel.

The others wait for it and find it in the cache; numba by itself compiles it in each of them. It
also writes down what a kernel's cache holds by adding to what it has read: of two processes that do
so at once one is forgotten, or its code is found under the other's types. So one writes at a time.

A lock is an empty file, and ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Seconds until nobody is waited for any longer: a kernel takes up to ten to compile on a core of
# its own. What is compiled twice costs time and nothing else.
_PATIENCE_S = 60.0
_PAUSE_S = 0.02


def compile_once(function: Any, folder: Path) -> Any:
    """Return numba's dispatcher of a kernel that is kept, which now asks other processes first.

    `folder`: where the locks lie, which all processes of the same kernels share.
    """
    cache, compile_here = function._cache, function.compile
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"

    def compile_here_or_wait(signature: Any) -> Any:
        key = cache._index_key(signature, function.targetctx.codegen())
        types = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        with held(folder / f"{name}-{types}.lock"):
            return compile_here(signature)

    function.compile = compile_here_or_wait
    cache._cache_file.save = _alone(cache._cache_file.save, folder / f"{name}.lock")
    return function


@contextmanager
def held(lock: Path, patience: float = _PATIENCE_S) -> Iterator[bool]:
    """Hold a file against other processes and threads, which is made where it is not there.

    Say whether it is held: it is not where another one has held it for `patience` seconds, or where
    the file system has no locks, or no room.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _take(descriptor, time.monotonic() + patience)
    finally:
        os.close(descriptor)


def _take(descriptor: int, end: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_PAUSE_S)
        except OSError:
            return False


def _alone(save: Callable[..., None], lock: Path) -> Callable[..., None]:
    @functools.wraps(save)
    def save_alone(*given: Any) -> None:
        with held(lock):
            save(*given)

    return save_alone
