"""A child that cannot outlive the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

from tgi_trio.errors import PeerGone

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when the thread that spawned it ends.

    Call first thing in `main`, with the pid of the router. Raises PeerGone when the router died
    before the call, OSError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died between our fork and the prctl: no signal will come
        raise PeerGone(f"router (pid {parent_pid})", "it died before this process had started")


def guard_death_pipe(fd: int, on_death: Callable[[], None] | None = None) -> threading.Thread:
    """Start a daemon thread that ends this process when the death pipe closes.

    The second line behind `die_with_parent`: the kernel drops the death signal when the spawning
    thread, not process, ends, and on a change of credentials. The thread blocks in read(2) and
    costs nothing. `on_death` replaces the SIGKILL in tests.
    """

    def watch() -> None:
        while os.read(fd, 1):
            continue
        if on_death is not None:
            on_death()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=watch, name="death-pipe", daemon=True)
    thread.start()
    return thread
