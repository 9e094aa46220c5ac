"""The compiled part: everything here runs without the interpreter, on raw addresses.

`variant.py` names the compile-time choices, `emit.py`, `vectors.py` and `tiles.py` hold the
operations that numba lacks, `threads.py` those of the team; the other files are the kernels, one
per part of a step, and `step.py` is the way in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from numba import config, njit

from tgi_trio.shard.numba_backend.kernels.cache import cache_folder
from tgi_trio.shard.numba_backend.kernels.locator import LOCATORS
from tgi_trio.shard.numba_backend.kernels.once import compile_once
from tgi_trio.shard.numba_backend.kernels.part import PartCompiler

_FOLDER = cache_folder()
if _FOLDER is not None:
    config.CACHE_DIR = str(_FOLDER)  # read by the decorator, so it cannot wait
    config.CACHE_LOCATOR_CLASSES = LOCATORS

# numpy's error model spares a test at each division.
_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
# For kernels that other kernels call: compiled into each caller, so there is nothing to keep, and
# no way in from Python, which would take as long to compile.
kernel = njit(
    pipeline_class=PartCompiler, no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS
)


def entry(function: Callable[..., Any]) -> Any:
    """Compile a kernel that Python calls; it is kept with everything it calls."""
    made = njit(cache=_FOLDER is not None, **_OPTIONS)(function)
    return made if _FOLDER is None else compile_once(made, _FOLDER)


def is_marked(name: str) -> bool:
    """Return whether something is in the cache that was marked so; True where there is no cache."""
    return _FOLDER is None or (_FOLDER / f"{name}.compiled").exists()


def mark(name: str) -> None:
    """Take note that something was compiled and kept."""
    if _FOLDER is not None:
        with contextlib.suppress(OSError):  # it costs time and nothing else
            (_FOLDER / f"{name}.compiled").touch()


def is_missing(function: Callable[..., Any]) -> bool:
    """Return whether an `entry` would be kept once it is compiled, and is not there for any types.

    A guess by the names of numba's files: what is wrong here costs time and nothing else.
    """
    return _FOLDER is not None and not any(_FOLDER.rglob(f"*.{function.__name__}-*.nbi"))
