"""Processes that compile kernels: threads of one process would wait for the GIL.

Triton's compiler is written in Python up to its intermediate representation of a kernel, and so is
the rehearsal that finds out what to compile. The processes put their results into Triton's cache on
disk, where this process finds them by the same key.

Each shares nothing with this process but a socket. They use no device, print nothing, and end with
the block for which they are started, or with this process, however that ends.
"""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from tgi_trio.shard.machine.cores import usable_cores

_MODULE: Final = "tgi_trio.shard.torch_backend.compiling.zygote"
_MOST: Final = 16
_PATIENCE_S: Final = 120.0  # for one kernel, which takes seconds; then the caller compiles it
_TO_END_S: Final = 2.0


class Compilers:
    """Compiles kernels in other processes, which the first one starts; any thread may call it."""

    def __init__(self, target: Callable[[], Sequence[Any]]) -> None:
        """`target`: returns the three arguments of Triton's `GPUTarget`, in any thread."""
        self._target = target
        self._starting = threading.Lock()
        self._zygote: subprocess.Popen[bytes] | None = None
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def compile(self, data: str) -> bool:
        """Compile a kernel, given Triton's description; return whether it is in Triton's cache.

        False if it cannot be compiled, no process is free, or there is no second core. At most
        `count_compilers` threads should call this at a time.
        """
        if count_compilers() < 2:
            return False
        try:
            self.begin()
            own = self._free.get_nowait()
        except (OSError, queue.Empty):  # processes cannot be started, or all have died
            return False
        try:
            own.sendall(data.encode() + b"\n")
            answer = _read_line(own)
        except OSError:  # it has died, or takes too long
            own.close()
            return False
        self._free.put(own)
        return json.loads(answer) is None

    def begin(self) -> None:
        """Start the processes, unless they are running or there is no second core.

        Raises OSError if they cannot be started.
        """
        with self._starting:
            if self._zygote is None and count_compilers() > 1:
                self._zygote = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with ExitStack() as theirs:
            places = []
            for _ in range(count_compilers()):
                ours, other = socket.socketpair()
                ours.settimeout(_PATIENCE_S)
                self._free.put(ours)
                places.append(theirs.enter_context(other).fileno())
            words = [json.dumps(list(self._target())), *map(str, places)]
            return subprocess.Popen(
                [sys.executable, "-m", _MODULE, *words],
                # The process ends when this is closed. A parent-death signal would come too early:
                # when the thread ends that has started the process.
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=places,
            )

    def close(self) -> None:
        """End the processes; no call of `compile` may be left."""
        while not self._free.empty():
            self._free.get_nowait().close()
        if self._zygote is None or self._zygote.stdin is None:
            return
        self._zygote.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._zygote.wait(_TO_END_S)
        self._zygote.kill()
        self._zygote.wait()


@contextmanager
def compilers(target: Callable[[], Sequence[Any]]) -> Iterator[Compilers]:
    """Yield `Compilers` for a target, and end their processes with the block."""
    made = Compilers(target)
    try:
        yield made
    finally:
        made.close()


def count_compilers() -> int:
    """Return how many kernels may be compiled at a time."""
    return min(_MOST, len(usable_cores()))


def _read_line(own: socket.socket) -> bytes:
    """Return a line from a socket; raises OSError if none arrives."""
    found = b""
    while not found.endswith(b"\n"):
        more = own.recv(1 << 16)
        if not more:
            raise ConnectionError("the compiler has died")
        found += more
    return found
