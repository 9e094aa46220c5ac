"""A server for the duration of a command: for `chat` and `bench` without --url."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import IO, Final

import trio

from tgi_trio.client.address import Address
from tgi_trio.client.http import Client, HTTPFailure
from tgi_trio.errors import ShardCannotStart
from tgi_trio.ipc.parent import die_with_parent

_POLL: Final = 0.02  # seconds
_LAST_WORDS: Final = 2000  # most bytes of its output in an error
_FAREWELL: Final = 5.0  # seconds from SIGTERM to SIGKILL


@asynccontextmanager
async def run_own_server(flags: Sequence[str]) -> AsyncGenerator[Address]:
    """Serve with `flags` on a Unix socket in a temporary folder until the block is left.

    The kernel ends the server if this process is killed. Raises ShardCannotStart, with the end of
    its output, if it ends before it is ready.
    """
    with tempfile.TemporaryDirectory(prefix="tgi-trio-") as folder:
        socket, log = Path(folder, "socket"), Path(folder, "log")
        argv = [sys.executable, "-m", "tgi_trio", "serve", *flags, "--bind", f"unix:{socket}"]
        with log.open("wb") as output:
            # Started by the main thread, before there are other threads.
            process = _start_server(argv, output)
        try:
            address = Address("localhost", unix=str(socket))
            await _wait_until_ready(process, address, log)
            yield address
        finally:
            process.terminate()
            with trio.CancelScope(shield=True), trio.move_on_after(_FAREWELL):
                while process.poll() is None:
                    await trio.sleep(_POLL)
            process.kill()
            process.wait()


def _start_server(argv: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,  # the command handles Ctrl-C
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


async def _wait_until_ready(process: subprocess.Popen[bytes], address: Address, log: Path) -> None:
    client = Client(address)
    while True:
        if process.poll() is not None:
            last = log.read_bytes()[-_LAST_WORDS:].decode(errors="replace").strip()
            raise ShardCannotStart(f"the server ended before it was ready:\n{last}")
        try:
            await client.get("/info")
            return
        except (OSError, HTTPFailure, trio.BrokenResourceError):
            await trio.sleep(_POLL)
