"""Pre-started shard processes, which import modules before it is known what they are to serve.

Such a process gets the arguments that would have been on its command line over a socket, with the
descriptors that it would have inherited, which get the same numbers. If the other end closes first,
it ends silently.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from tgi_trio.errors import PeerGone
from tgi_trio.ipc.parent import die_with_parent

WAIT: Final = "--wait"  # followed by the descriptor, the parent's process id, and what to import
_PLACES: Final = 256  # descriptor numbers below this are kept free for those that are received
_MOST_FDS: Final = 250  # the kernel's limit is 253 per message
_PIECE: Final = 1 << 16  # bytes read at a time


@dataclass(frozen=True, slots=True)
class _Waiting:
    process: subprocess.Popen[bytes]
    end: socket.socket

    def close(self) -> None:
        """Kill the process and reap it."""
        self.process.kill()
        self.process.wait()
        self.end.close()  # last: at its end the process would end by itself
        if self.process.stdout is not None:
            self.process.stdout.close()


class WaitingShards:
    """Pre-started processes; `take` turns the first of them into a shard."""

    def __init__(self, waiting: Sequence[_Waiting] = ()) -> None:
        self._waiting = list(waiting)

    def take(self, words: Sequence[str], fds: Iterable[int]) -> subprocess.Popen[bytes] | None:
        """Have a process go on as if it had been started with arguments `words` and `fds`.

        The process and the pipe of its output belong to the caller then. None: none is left.
        """
        places = sorted(set(fds))
        while self._waiting:
            found = self._waiting.pop(0)  # the first first: ranks in the order of their starts
            if len(places) <= _MOST_FDS and max(places, default=0) < _PLACES:
                with suppress(OSError):  # it has died: the next one, or a new process, is used
                    _send(found.end, json.dumps([list(words), places]).encode(), places)
                    found.end.close()
                    return found.process
            found.close()
        return None

    def close(self) -> None:
        """End the processes that were not taken."""
        while self._waiting:
            self._waiting.pop().close()


@contextmanager
def waiting_shards(count: int, kind: str) -> Iterator[WaitingShards]:
    """Start `count` processes, which import what shards of a `kind` need: `shard/early_imports.py`.

    None where so few descriptors may be open that numbers from `_PLACES` on are not to be had.
    Leaving the context ends those that have not been taken. Main thread only.
    """
    shards = WaitingShards()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = count if soft >= _PLACES + _MOST_FDS else 0
    try:
        with suppress(OSError):  # the machine refuses one: `spawn_shard` will report that
            for _ in range(count):
                shards._waiting.append(_start(kind))
        yield shards
    finally:
        shards.close()


def _start(kind: str) -> _Waiting:
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tgi_trio.shard",
                    WAIT,
                    f"{theirs.fileno()}",
                    f"{os.getpid()}",
                    kind,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # as for `spawn_shard`
            )
    except OSError:
        ours.close()
        raise
    return _Waiting(process, ours)


def _send(end: socket.socket, message: bytes, fds: Sequence[int]) -> None:
    sent = socket.send_fds(end, [message], fds)
    end.sendall(message[sent:])


def wait_for_words(
    fd: int, parent_pid: int, tasks: Iterable[Callable[[], object]]
) -> list[str] | None:
    """Wait for this process's arguments at `fd` and return them; None if the other end closes.

    Meanwhile runs the `tasks` one after the other; those not begun by then are skipped. Received
    descriptors get the numbers that they have at the other end, so this has to be called before
    anything that stays open is opened.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as `shard.process.serve` does
        signal.signal(number, signal.SIG_IGN)
    try:
        die_with_parent(parent_pid)
    except PeerGone:
        return None
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _PLACES)
    os.close(fd)
    kept = _keep_places()
    with socket.socket(fileno=moved) as end:
        for task in tasks:
            if select.select([end], [], [], 0)[0]:
                break
            task()
        with suppress(OSError, ValueError):  # the other end has died, perhaps while sending
            return _receive(end, kept)
    return None


def _keep_places() -> set[int]:
    """Occupy all free descriptor numbers below `_PLACES`; returns them."""
    kept = set()
    while (place := os.open(os.devnull, os.O_RDONLY)) < _PLACES:
        kept.add(place)
    os.close(place)
    return kept


def _receive(end: socket.socket, kept: set[int]) -> list[str] | None:
    data, fds, _, _ = socket.recv_fds(end, _PIECE, _MOST_FDS)
    while more := end.recv(_PIECE):
        data += more
    if not data:
        return None
    words, places = json.loads(data)
    for fd, place in zip(fds, places, strict=True):
        os.dup2(fd, place)
        os.close(fd)
    words = [str(word) for word in words]
    if not kept.issuperset(places):
        # A library has one of them open, such as libffi, from which ctypes takes memory to execute
        # later on. A new program has nothing open but what it was given.
        os.execv(sys.executable, [sys.executable, "-m", "tgi_trio.shard", *words])
    for place in kept.difference(places):
        os.close(place)
    return words
