"""Runs the ranks of a node whose server is on another node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from tgi_trio.cluster.divided import share_devices

LOOK_S: Final = 0.2  # between two checks that all ranks are running
_DEVICES: Final = "CUDA_VISIBLE_DEVICES"


def run_ranks(commands: Sequence[Sequence[str]]) -> Iterator[None]:
    """Start a process for each command; yields once, when all are started.

    As soon as one of them ends, which happens only if something is wrong, the others are killed and
    the iterator ends. The devices that this process sees are divided among them.
    """
    shares: Sequence[str | None] = [None] * len(commands)
    if visible := os.environ.get(_DEVICES):
        shares = share_devices(visible, len(commands))
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(_rank(command, devices))
            for command, devices in zip(commands, shares, strict=True)
        ]
        yield
        while all(rank.poll() is None for rank in ranks):
            time.sleep(LOOK_S)


@contextmanager
def _rank(words: Sequence[str], devices: str | None) -> Iterator[subprocess.Popen[bytes]]:
    environ = dict(os.environ) if devices is None else {**os.environ, _DEVICES: devices}
    rank = subprocess.Popen(
        [sys.executable, "-m", "tgi_trio.cluster.kept_server", str(os.getpid()), *words],
        stdin=subprocess.DEVNULL,
        env=environ,
    )
    try:
        yield rank
    finally:
        rank.kill()
        rank.wait()
