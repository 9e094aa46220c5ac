"""Programs of ours that start without importing what most of a start goes into importing.

A process that has imported it all (`tests.support.warm_process`) is forked for each. What runs then
is what `python -m` would run, in a process of its own. What tests say of starts themselves, or of
variables that Python or libraries read as they are imported, needs a new interpreter.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from tests.support.warm_children import kind_for

_PATIENCE = 240.0  # seconds
_LAST_PATIENCE = 10.0  # seconds, for what has nothing more to do
_ROOM = 1000  # bytes that a forked process can show of its command line
EARLY = dict(os.environ)  # before a test has changed it: what is imported is for all of them
# Kinds whose process imports what that of another does, and more.
_FORKED_OFF: Final = {"real": "plain", "plain": "fake"}
_lock = threading.Lock()


class WarmProcess:
    """What `subprocess.Popen` is, as far as tests of servers ask."""

    def __init__(self, asker: socket.socket) -> None:
        self.returncode: int | None = None
        self._asker = asker  # while it is open, the process keeps its number
        self.pid = int(asker.recv(64))

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal; None while it runs."""
        if self.returncode is None and select.select([self._asker], [], [], 0)[0]:
            self.returncode = int(self._asker.recv(64))
            self._asker.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once there is one; raises TimeoutExpired."""
        if self.returncode is None:
            select.select([self._asker], [], [], timeout)
        found = self.poll()
        if found is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return found

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(15)

    def kill(self) -> None:
        self.send_signal(9)


def start_warm(
    arguments: Sequence[str],
    stdout: int,
    stderr: int,
    *,
    stdin: int | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    network: str = "",
    shards: str = "",
    imports: str = "",
) -> WarmProcess:
    """Run `python ARGUMENTS`: `-m MODULE` or `-c PROGRAM`, and words.

    `stdin`, `stdout`, `stderr`: descriptors; nothing is read without the first. Environment and
    working folder are this process's where none are given; so is the network, where there is no
    name of another one, as `ip netns` has it. `shards`: what runs is a server, whose shards are
    forked as well if they are `real`, `plain` or `fake` ones (`tests.support.warm_children`); it
    has imported what they import. `imports`: what runs has no shards, and has imported what is
    imported for this kind. What runs is the head of a session, and ends with the process
    that forks it, which ends with this one.
    """
    variables = dict(os.environ if environment is None else environment)
    shards = kind_for(shards, variables, EARLY)
    start = {
        "arguments": arguments,
        "environment": variables,
        "folder": str(folder or Path.cwd()),
        "network": network,
        "shards": shards,
        "places": [],
    }
    with open(os.devnull, "rb") as nothing:
        fds = [nothing.fileno() if stdin is None else stdin, stdout, stderr]
        if shards:
            fds.append(way_to("images").fileno())
        return _fork(way_to(shards or imports), start, fds)


def _fork(way: socket.socket, start: Mapping[str, object], fds: Sequence[int]) -> WarmProcess:
    """Return what is forked off the process at the other end."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        socket.send_fds(way, [json.dumps(start).encode()], [*fds, its.fileno()])
    return WarmProcess(mine)


def run_warm(
    *arguments: str,
    text: str = "",
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    shards: str = "",
    imports: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` to its end with `text` to read; return what it says.

    `shards`: `real` for what has torch to import; `imports`: as for `start_warm`.
    """
    with ExitStack() as stack:
        given, out, err = (stack.enter_context(TemporaryFile("w+")) for _ in range(3))
        given.write(text)
        given.seek(0)
        process = start_warm(
            arguments,
            out.fileno(),
            err.fileno(),
            stdin=given.fileno(),
            environment=environment,
            folder=folder,
            shards=shards,
            imports=imports,
        )
        try:
            code = process.wait(_PATIENCE)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        argv = [sys.executable, *arguments]
        return subprocess.CompletedProcess(argv, code, out.read(), err.read())


def way_to(shards: str) -> socket.socket:
    """Return the way to the process that is forked for a kind, which the first call starts.

    What has no shards is forked off the same one as what has fake ones, which take little.
    """
    with _lock:
        return _warm_process(shards or "fake")[1]


@functools.cache
def _warm_process(shards: str) -> tuple[subprocess.Popen[bytes] | WarmProcess, socket.socket]:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process: subprocess.Popen[bytes] | WarmProcess
    with its:
        if shards in _FORKED_OFF:
            process = _fork_again(shards, its)
        else:
            words = [str(its.fileno()), shards, " " * _ROOM]
            argv = [sys.executable, "-m", "tests.support.warm_process", *words]
            process = subprocess.Popen(
                argv,
                env=EARLY,
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
    # Those that are forked off others end first: they have been registered later.
    atexit.register(_end, os.getpid(), process, mine)
    return process, mine


def _end(
    owner: int, process: subprocess.Popen[bytes] | WarmProcess, control: socket.socket
) -> None:
    """End what was kept for all tests, and wait for it, in the process that began it."""
    control.close()
    if os.getpid() != owner:
        return
    try:
        process.wait(_LAST_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _fork_again(shards: str, its: socket.socket) -> WarmProcess:
    """Return a process to fork a kind off, itself forked off one that has imported half of that."""
    place = 3
    start = {
        "arguments": ["-m", "tests.support.warm_process", str(place), shards],
        "environment": EARLY,
        "folder": str(Path.cwd()),
        "network": "",
        "shards": "",
        "places": [place],
    }
    with open(os.devnull, "rb") as nothing:
        fds = [nothing.fileno(), 1, 2, its.fileno()]
        return _fork(_warm_process(_FORKED_OFF[shards])[1], start, fds)
