"""The front before a cluster's servers: one address for all of them, as long as they are kept.

A process of its own, so that no request waits for the keeper. It reads the servers' file, ends with
the keeper, and is started again when it ends before that.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

log = logging.getLogger("tgi_trio.cluster.kept_front")

# Seconds before it is started again, by how often it has ended within STABLE_AFTER of its start.
BACK_OFF: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_AFTER: Final = 60.0


class Process(Protocol):
    """What is needed of `subprocess.Popen`."""

    def poll(self) -> int | None: ...
    def send_signal(self, sig: int) -> None: ...


def front_words(
    bind: str, replicas_file: Path, secret_file: Path | None, more: Sequence[str] = ()
) -> list[str]:
    """Return the words of `front` before the servers of a file; `more`: of its log."""
    words = ["front", "--bind", bind, "--replicas-file", str(replicas_file), *more]
    return words if secret_file is None else [*words, "--cluster-secret-file", str(secret_file)]


def start_front(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the front, which dies with this process.

    In a group of its own: Ctrl-C is the keeper's to hear, who tells the front once.
    """
    argv = [sys.executable, "-m", "tgi_trio.cluster.kept_server", str(os.getpid()), *words]
    return subprocess.Popen(argv, process_group=0)


class KeptFront:
    """Has a front run from the first `look` to `close`."""

    def __init__(self, start: Callable[[], Process]) -> None:
        self._start = start
        self._process: Process | None = None
        self._since = 0.0  # when it was started, seconds
        self._again = 0.0  # when it is to be started
        self._ends = 0  # within STABLE_AFTER of a start, in a row
        self._closing = False

    def look(self, now: float) -> None:
        """Start it, or start it again, if it is not there; `now`: seconds."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            if not self._closing:
                self._ends = 0 if now - self._since > STABLE_AFTER else self._ends + 1
                wait = BACK_OFF[min(self._ends, len(BACK_OFF) - 1)]
                self._again = now + wait
                log.warning("the front has ended (code %s); again in %g s", code, wait)
        if self._process is None and not self._closing and now >= self._again:
            self._process = self._start()
            self._since = now

    def close(self) -> None:
        """Have it take nothing new, and end when what it has is done. Idempotent."""
        if self._process is not None and not self._closing:
            self._process.send_signal(signal.SIGTERM)
        self._closing = True

    @property
    def ended(self) -> bool:
        """Whether it is not there any more, as `look` has seen it."""
        return self._process is None
