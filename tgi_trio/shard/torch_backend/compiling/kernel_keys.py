"""Keys by which Triton keeps compiled kernels, made the same in every process.

A key is a hash of a kernel's source and of what it calls, and of constants that those name. Triton
takes the constants of a callee along only where that has had a key before: the key of a kernel
depends on which others were looked at before it, in this thread or another, and a kernel that is in
the cache is not found. Where all callees have theirs first, it does not.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

_SUMMING: Final = threading.Lock()


def sum_compiler() -> None:
    """Have Triton sum its own files, which is part of all keys and is kept.

    They are 416 MB, which takes up to two seconds where nobody has read them lately. Threads that
    come meanwhile wait; each would do it for itself.
    """
    with _SUMMING, suppress(ImportError):  # where it is depends on Triton's version
        from triton.runtime.cache import triton_key

        triton_key()


def settle_key(function: Any) -> None:
    """Have a kernel of Triton's, and first all that it calls, make the key that it keeps."""
    from triton.runtime import jit

    kinds = getattr(jit, "JITCallable", jit.JITFunction)  # of Triton's before 3.5
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
