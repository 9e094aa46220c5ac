"""Makes the keys of Triton's cache of compiled kernels the same in every process.

A key is a hash of the sources of a kernel and its callees, and of the constants that these name.
But Triton includes a callee's constants only if that has had its key computed before. So the key of
a kernel depends on which others were looked at before it, in this thread or another, and a kernel
in the cache may not be found. Keys are the same if those of all callees are computed first.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

_HASHING: Final = threading.Lock()


def hash_compiler() -> None:
    """Have Triton hash its own files, which is a part of all keys and is cached.

    They are 416 MB; that takes up to two seconds if they are not in the page cache. Threads that
    call this meanwhile wait, since each would do it again.
    """
    with _HASHING, suppress(ImportError):  # its place depends on Triton's version
        from triton.runtime.cache import triton_key

        triton_key()


def settle_key(function: Any) -> None:
    """Have a Triton kernel compute and keep its key, after those of everything that it calls."""
    from triton.runtime import jit

    kinds = getattr(jit, "JITCallable", jit.JITFunction)  # the latter before Triton 3.5
    _settle(function, kinds, set())


def _settle(function: Any, kinds: type, seen: set[int]) -> None:
    seen.add(id(function))
    names = function.fn.__code__.co_names
    found = [function.__globals__.get(name) for name in names]
    modules = [each for each in found if isinstance(each, ModuleType)]
    found += [getattr(module, name, None) for module in modules for name in names]
    for each in found:
        if isinstance(each, kinds) and id(each) not in seen:
            _settle(each, kinds, seen)
    _ = function.cache_key
