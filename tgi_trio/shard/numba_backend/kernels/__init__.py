"""The compiled kernels: everything here runs without the interpreter, on raw addresses.

`variant.py` has the compile-time choices as numba types. `emit.py`, `vectors.py` and `tiles.py` add
operations that numba lacks, `threads.py` those of the team. The other files are the kernels, one
per part of a step; `step.py` is the entry. `compiling.py` makes object files of the entries that
`machine_code/entry.py` lists; nothing else imports this room.
"""

from __future__ import annotations

from typing import Any, Final

from numba import njit

from tgi_trio.shard.numba_backend.kernels.part import EntryCompiler, PartCompiler

# numpy's error model saves a test at each division. Kernels have no wrappers for calls from Python,
# which would take as long to compile.
_OPTIONS: Final[dict[str, Any]] = {
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,  # no reference counting: arrays are views of memory that others own
}
kernel = njit(pipeline_class=PartCompiler, **_OPTIONS)  # called by other kernels
# takes integers, and is called through `machine_code/`
entry = njit(pipeline_class=EntryCompiler, **_OPTIONS)
