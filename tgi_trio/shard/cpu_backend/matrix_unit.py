"""Permission to use the matrix unit (AMX), which Linux gives to a process on request.

Its registers are 8 KiB, for which the kernel makes room in a thread's saved state at first use.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from typing import Final

_SYSCALL: Final = 158  # arch_prctl of x86-64
_REQUEST: Final = 0x1023  # ARCH_REQ_XCOMP_PERM
_TILE_DATA: Final = 18  # the component of the processor's state that holds matrix registers


@cache
def find_refusal() -> str | None:
    """Ask for the matrix unit, for all threads of this process; return why it is refused, or None.

    Kernels before 5.16 do not know the question, sandboxes may not pass it on, and Linux refuses
    where the alternate stack of a signal handler has no room for the registers.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "only Linux on x86-64 gives it"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYSCALL, _REQUEST, _TILE_DATA):
        return os.strerror(ctypes.get_errno())
    return None
