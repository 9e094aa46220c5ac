"""Starts a server on its machine and reports on it to the controller.

Nothing here uses Ray: `controller.py` makes an actor of this class, and Ray delivers what `run`
yields.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Final, TypeAlias

from tgi_trio.cluster.divided import Divided
from tgi_trio.cluster.scaling import ReplicaLoad

LOOK_S: Final = 0.2  # between two checks whether it serves
LOAD_S: Final = 5.0  # between two reports of its load
_ANSWER_S: Final = 5.0  # timeout of the server's answers


@dataclass(frozen=True)
class Placed:
    """It has been started on a machine."""

    ranks_at: str | None = None  # the address to which ranks of other nodes connect


@dataclass(frozen=True)
class Serves:
    """It answers requests."""

    address: str


ReplicaReport: TypeAlias = Placed | Serves | ReplicaLoad


class ReplicaHost:
    """One server on this machine."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._stopping = False  # it was told to stop, perhaps before it was started

    def run(
        self, host: str, words: Sequence[str], divided: Divided | None = None
    ) -> Iterator[ReplicaReport]:
        """Run the server with the arguments `words`, until its process ends.

        `divided`: set if other nodes have ranks of it. Yields `Placed` at once, `Serves` when it
        answers, and then its load every LOAD_S seconds.
        """
        with ExitStack() as held:
            ranks_at = None
            if divided is not None:
                ranks_at = _address(host, held.enter_context(_reserve_port(host)))
                words = [*words, *divided.leader_words(ranks_at)]
            yield Placed(ranks_at)
            port = held.enter_context(_reserve_port(host))
            server = self._server = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tgi_trio.cluster.kept_server", str(os.getpid())),
                    *("serve", "--hostname", host, "--port", str(port), *words),
                ],
                stdin=subprocess.DEVNULL,
            )
            if self._stopping:
                server.terminate()
            try:
                yield from _follow(server, _address(host, port))
            finally:  # it has ended, or the caller has closed this iterator
                server.kill()
                server.wait()

    def stop(self) -> None:
        """Have the server drain and end, within its own --graceful-termination-timeout.

        Called by another thread than `run`, at any time after it.
        """
        self._stopping = True  # first: either this sees the server, or `run` sees this
        if self._server is not None:
            self._server.terminate()


def _follow(server: subprocess.Popen[bytes], address: str) -> Iterator[ReplicaReport]:
    """Yield what a server that starts comes to say, until its process has ended."""
    while not _waited(server, LOOK_S):
        if _get(f"http://{address}/health") is not None:
            yield Serves(address)
            break
    while not _waited(server, LOAD_S):
        if (page := _get(f"http://{address}/metrics")) is not None:
            yield read_load(page)


def read_load(page: str) -> ReplicaLoad:
    """Return a server's load from its `/metrics` page; missing metrics count as 0."""
    found = {
        name: float(value)
        for name, _, value in (line.partition(" ") for line in page.splitlines())
        if name.startswith("tgi_") and "{" not in name
    }
    total = found.get("tgi_kv_blocks_total", 0.0)
    idle = found.get("tgi_kv_blocks_free", 0.0) + found.get("tgi_prefix_cache_blocks", 0.0)
    return ReplicaLoad(
        waiting=int(found.get("tgi_queue_size", 0)),
        running=int(found.get("tgi_batch_current_size", 0)),
        kv_used=max(0.0, 1 - idle / total) if total else 0.0,
    )


def _waited(server: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait up to `seconds`; return whether the process has ended."""
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _get(url: str) -> str | None:
    """Return a page; None if it cannot be fetched."""
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            page: bytes = answer.read()
    except (OSError, HTTPException):  # the latter where a server ends in the middle of an answer
        return None
    return page.decode()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def _reserve_port(host: str) -> Iterator[int]:
    """Yield a port that nobody has, kept for a server of ours until the block is left.

    It stays bound, by a socket that does not listen. Linux lets a server bind beside it that sets
    SO_REUSEADDR, as ours do, and gives the port to nobody who asks for any.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])
