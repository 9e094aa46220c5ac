"""The compiled part: everything here runs without the interpreter, on raw addresses.

`variant.py` has the compile-time choices as numba's types, `emit.py`, `vectors.py` and `tiles.py`
hold the operations that numba lacks, `threads.py` those of the team; the other files are the
kernels, one per part of a step, and `step.py` is the way in. `compiling.py` makes object files of
the entries that `machine_code/entry.py` lists: nobody else imports this room.
"""

from __future__ import annotations

from typing import Any, Final

from numba import njit

from tgi_trio.shard.numba_backend.kernels.part import EntryCompiler, PartCompiler

# numpy's error model spares a test at each division. No kernel has a way in from Python, which
# would take as long to compile.
_OPTIONS: Final[dict[str, Any]] = {
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,  # arrays at an address are nobody's to count
}
kernel = njit(pipeline_class=PartCompiler, **_OPTIONS)  # that other kernels call
entry = njit(pipeline_class=EntryCompiler, **_OPTIONS)  # of whole numbers, see `machine_code/`
