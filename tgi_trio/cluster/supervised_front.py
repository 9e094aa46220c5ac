"""Keeps a front running in front of a cluster's servers, beside the controller.

The front is a process of its own, so that no request waits for the controller. It reads the
servers' addresses from the file, ends with the controller, and is restarted if it ends earlier.
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

log = logging.getLogger("tgi_trio.cluster.supervised_front")

# Seconds before a restart, by the number of consecutive ends within STABLE_AFTER of a start.
BACK_OFF: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_AFTER: Final = 60.0  # seconds


class Process(Protocol):
    """The part of `subprocess.Popen` that is used."""

    def poll(self) -> int | None: ...
    def send_signal(self, sig: int) -> None: ...


def front_words(
    bind: str, replicas_file: Path, secret_file: Path | None, more: Sequence[str] = ()
) -> list[str]:
    """Return the command line of a front for the servers in a file; `more`: logging flags."""
    words = ["front", "--bind", bind, "--replicas-file", str(replicas_file), *more]
    return words if secret_file is None else [*words, "--cluster-secret-file", str(secret_file)]


def start_front(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the front, which dies with this process.

    It has a process group of its own, so that Ctrl-C reaches the controller alone, which passes it
    on.
    """
    argv = [sys.executable, "-m", "tgi_trio.cluster.kept_server", str(os.getpid()), *words]
    return subprocess.Popen(argv, process_group=0)


class SupervisedFront:
    """Keeps a front running from the first `look` until `close`."""

    def __init__(self, start: Callable[[], Process]) -> None:
        self._start = start
        self._process: Process | None = None
        self._since = 0.0  # when it was started, seconds
        self._again = 0.0  # when it may be started again, seconds
        self._ends = 0  # consecutive ends within STABLE_AFTER of a start
        self._closing = False

    def look(self, now: float) -> None:
        """Start the front if it is not running and may be started; `now`: seconds."""
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
            if self._closing:  # meanwhile: `close` has seen no process
                self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Have the front drain and end. Idempotent; the handler of a signal may call it."""
        if self._process is not None and not self._closing:
            self._process.send_signal(signal.SIGTERM)
        self._closing = True

    @property
    def ended(self) -> bool:
        """Whether the front was not running at the last `look`."""
        return self._process is None
