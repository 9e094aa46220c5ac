"""Shards that are started before it is known what they are to serve: they import meanwhile.

Such a process waits at a socket for what would have been its command line, and for the descriptors
that it would have inherited, which get the same numbers. If the other end closes before that, it
ends silently.
"""

from __future__ import annotations

import fcntl
import json
import os
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

WAIT: Final = "--wait"  # then the descriptor, the parent's process id, what to import
_PLACES: Final = 256  # numbers of descriptors that are kept free for those that come
_MOST_FDS: Final = 250  # the kernel's limit is 253 a message
_PIECE: Final = 1 << 16  # bytes that are read at a time


@dataclass(frozen=True, slots=True)
class _Waiting:
    process: subprocess.Popen[bytes]
    end: socket.socket

    def close(self) -> None:
        """End the process and reap it; it has nothing to lose."""
        self.end.close()
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class WaitingShards:
    """Processes that wait; `take` gives the first of them something to do."""

    def __init__(self, waiting: Sequence[_Waiting] = ()) -> None:
        self._waiting = list(waiting)

    def take(self, words: Sequence[str], fds: Iterable[int]) -> subprocess.Popen[bytes] | None:
        """Have a process go on as if it had been started with `words` and inherited `fds`.

        From then on it belongs to the caller, and so does the pipe of its output. None: no process
        is left.
        """
        places = sorted(set(fds))
        while self._waiting:
            found = self._waiting.pop(0)  # so ranks are in the order of their starts
            if len(places) <= _MOST_FDS and max(places, default=0) < _PLACES:
                with suppress(OSError):  # it has died; whoever is started instead says why
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
    """Start `count` processes, which import what shards of a `kind` need; see `shard/ahead.py`.

    Leaving the block ends those that have not been taken. Main thread only.
    """
    shards = WaitingShards()
    try:
        for _ in range(count):
            shards._waiting.append(_start(kind))
        yield shards
    finally:
        shards.close()


def _start(kind: str) -> _Waiting:
    ours, theirs = socket.socketpair()
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
    return _Waiting(process, ours)


def _send(end: socket.socket, message: bytes, fds: Sequence[int]) -> None:
    sent = socket.send_fds(end, [message], fds)
    end.sendall(message[sent:])


def wait_for_words(
    fd: int, parent_pid: int, tasks: Iterable[Callable[[], object]]
) -> list[str] | None:
    """Return the command line that this process gets through `fd`; None: none will come.

    Does the `tasks` meanwhile, one after the other, until it comes; the rest are left out.
    Descriptors that come with it get the numbers that they have at the other end, so call this
    before opening anything that stays open.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # as `shard.process.serve` does
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
        with suppress(OSError, ValueError):  # the other end has died, in the middle of it perhaps
            return _receive(end, kept)
    return None


def _keep_places() -> set[int]:
    """Occupy all numbers of descriptors below `_PLACES`; return those that were free."""
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
    for place in kept.difference(places):
        os.close(place)
    return [str(word) for word in words]
