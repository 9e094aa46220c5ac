"""Processes that compile kernels: threads of one process would take turns.

Triton's compiler is in Python up to its own representation of a kernel, and so is the rehearsal
that finds out what is to be compiled. What processes compile they leave in Triton's cache on disk,
where it is found by the key that it is looked for with.

They hold nothing of this process but a socket each, know of no device, say nothing, and end with
the block that they are started for, or with this process, however that ends.
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
_PATIENCE_S: Final = 120.0  # for one kernel, which takes seconds; then whoever asked compiles it
_TO_END_S: Final = 2.0


class Compilers:
    """Compiles kernels in other processes, which are started with the first; any thread may ask."""

    def __init__(self, target: Callable[[], Sequence[Any]]) -> None:
        """`target` returns the three words of a `GPUTarget` of Triton's, in any thread."""
        self._target = target
        self._starting = threading.Lock()
        self._zygote: subprocess.Popen[bytes] | None = None
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def compile(self, data: str) -> bool:
        """Compile a kernel as Triton describes it; return whether it is in Triton's cache.

        Not where it does not compile, nor where there is no process that is free, or no second
        core. At most `count_compilers` should ask at a time.
        """
        if count_compilers() < 2:
            return False
        try:
            self.begin()
            own = self._free.get_nowait()
        except (OSError, queue.Empty):  # the machine has no process to give, or all have died
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
        """Start the processes, unless they are there or there is no second core.

        Raises OSError where the machine has none to give.
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
                stdin=subprocess.PIPE,  # it ends with it: the thread that starts it may end before
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=places,
            )

    def close(self) -> None:
        """End the processes; to be called when nobody asks any more."""
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
    """Yield what compiles during the block for a target, as `Compilers` wants it."""
    made = Compilers(target)
    try:
        yield made
    finally:
        made.close()


def count_compilers() -> int:
    """Return how many kernels are compiled at a time."""
    return min(_MOST, len(usable_cores()))


def _read_line(own: socket.socket) -> bytes:
    """Return what comes up to the end of a line; raises OSError where none does."""
    found = b""
    while not found.endswith(b"\n"):
        more = own.recv(1 << 16)
        if not more:
            raise ConnectionError("the compiler has died")
        found += more
    return found
