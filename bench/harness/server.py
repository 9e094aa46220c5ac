"""Start a server for a benchmark and stop it again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Protocol

from tgi_trio.ipc.parent import die_with_parent
from tgi_trio.testing.ports import reserve_port

_END_S: Final = 120.0  # until a server is killed that was told to end


@dataclass(frozen=True)
class Server:
    """A running server."""

    host: str
    port: int
    ready_s: float  # command to /health answering 200
    pid: int = 0  # of the router; 0 when it is not ours


def free_port() -> int:
    """Return a port that is free now, for a program beside which no socket may be bound to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def mortal() -> Callable[[], None]:
    """Return what a child runs first, so that it ends with us: a benchmark may be killed, too."""
    return partial(die_with_parent, os.getpid())


class Process(Protocol):
    """What is asked of a server's process."""

    pid: int
    returncode: Any  # None while it runs

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def start_process(
    command: Sequence[str | Path], output: int | IO[bytes] | None, environment: Mapping[str, str]
) -> Process:
    """Start a program as the head of a session; it says everything to `output`."""
    return subprocess.Popen(
        command,
        stdout=output,
        stderr=output,
        env={**os.environ, **environment},
        start_new_session=True,
        preexec_fn=mortal(),
    )


def wait_healthy(port: int, process: Process, timeout: float = 300.0) -> None:
    """Poll /health until it says 200; raises RuntimeError when the server ends or time is up."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server exited with {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.01)
    raise RuntimeError(f"the server was not ready within {timeout:g} s")


@contextmanager
def running(
    flags: Sequence[str] = (),
    *,
    quiet: bool = True,
    fake: str | None = None,
    log: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Serve with `flags` on a port of its own; SIGTERM on leaving.

    `fake`: FakeSettings as JSON, for a shard without a model; `log`: where what it says goes.
    `environment` as for `serving`.
    """
    module = ["tgi_trio"] if fake is None else ["tgi_trio.testing.fake_server", fake]
    argv = [sys.executable, "-m", *module, "--hostname", "127.0.0.1"]
    output = log if log is not None else subprocess.DEVNULL if quiet else None
    with reserve_port() as port:
        command = [*argv, "--port", str(port), *flags]
        with serving(command, port, output=output, environment=environment) as server:
            yield server


@contextmanager
def serving(
    command: Sequence[str | Path],
    port: int,
    *,
    output: int | IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> Iterator[Server]:
    """Run a server that answers /health at `port` when it is ready; SIGTERM on leaving.

    `environment` is added to ours; `timeout`: seconds it may take to be ready.
    """
    start = time.monotonic()
    process = start_process(command, output, environment or {})
    try:
        wait_healthy(port, process, timeout)
        yield Server("127.0.0.1", port, time.monotonic() - start, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):  # not every server ends its own workers
            os.killpg(process.pid, signal.SIGKILL)
