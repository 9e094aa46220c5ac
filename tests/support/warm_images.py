"""Processes that decode images, forked off one that has imported transformers' processors.

A tenth of what a test with images takes goes into importing them, for each server anew: without
torch, so that what forks shards cannot fork these. They are not children of who asks for them. What
they read ends with it, and so they end.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, cast

import trio

from tests.support.warm_children import PROGRAMS, kind_for
from tgi_trio.router import sandbox_pool
from tgi_trio.router.sandbox_pool import Sandbox

PROGRAM: Final = PROGRAMS["images"]
_ABOVE: Final = 512  # numbers of descriptors that are given on are lower

_open_process = sandbox_pool._spawn


class ForkedProcess:
    """What `trio.Process` is, as far as sandboxes ask."""

    def __init__(self, asker: socket.socket, pipes: Sequence[int]) -> None:
        self.stdin, self.stdout, self.stderr = map(trio.lowlevel.FdStream, pipes)
        self.returncode: int | None = None
        self._asker = asker  # while it is open, the process keeps its number
        self.pid = int(asker.recv(64))
        asker.setblocking(False)

    def poll(self) -> int | None:
        if self.returncode is None:
            with suppress(BlockingIOError):
                self._end(self._asker.recv(64))
        return self.returncode

    async def wait(self) -> int:
        while (code := self.poll()) is None:
            await trio.lowlevel.wait_readable(self._asker)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 9)

    def _end(self, said: bytes) -> None:
        self.returncode = int(said or -9)  # nobody is left to say it: killed with all others
        self._asker.close()


def fork_decoders(control: Callable[[], socket.socket], early: Mapping[str, str]) -> None:
    """Have this process's decoders forked from here on, by whoever listens at what `control` gives.

    `early`: the variables that were there at its imports; with others of those that are read then,
    decoders are started as ever.
    """

    async def spawn(asked: Sandbox) -> tuple[trio.Process, int | None]:
        words = list(asked.argv[1:])
        same = kind_for("real", os.environ, early) == "real"
        if not same or words[:2] != ["-m", PROGRAM] or max(asked.fds, default=0) >= _ABOVE:
            return await _open_process(asked)
        places, results = list(asked.fds), None
        if asked.results:
            results = os.memfd_create("images", os.MFD_CLOEXEC)
            words.append(str(results))
            places.append(results)
        try:
            process = await trio.to_thread.run_sync(_fork, control(), words, places)
        except BaseException:
            if results is not None:
                os.close(results)
            raise
        return cast(trio.Process, process), results

    vars(sandbox_pool)["_spawn"] = spawn


def _fork(control: socket.socket, words: list[str], places: list[int]) -> ForkedProcess:
    """Return a process that runs `python WORDS`, with descriptors of the same numbers."""
    start: dict[str, Any] = {
        "arguments": words,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "network": "",
        "shards": "",
        "places": places,
    }
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipes = [os.pipe() for _ in range(3)]
    ours = pipes[0][1], pipes[1][0], pipes[2][0]
    theirs = pipes[0][0], pipes[1][1], pipes[2][1]
    with its, ExitStack() as stack:
        for end in theirs:
            stack.callback(os.close, end)
        fds = [*theirs, *places, its.fileno()]
        socket.send_fds(control, [json.dumps(start).encode()], fds)
    return ForkedProcess(mine, ours)
