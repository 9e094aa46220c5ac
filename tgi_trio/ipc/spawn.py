"""Starting a shard process so that it cannot outlive the router."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import trio

from tgi_trio.ipc.endpoints import Endpoints


@dataclass(frozen=True)
class ShardProcess:
    """A running shard: the process and a pidfd on it."""

    process: subprocess.Popen[bytes]
    pidfd: int

    @classmethod
    def of(cls, process: subprocess.Popen[bytes]) -> ShardProcess:
        """Take over a process of ours that has not been reaped."""
        return cls(process, os.pidfd_open(process.pid))

    @property
    def pid(self) -> int:
        """Process id; never reused before `reap()`."""
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL it; harmless if it has ended."""
        self.process.kill()

    async def reap(self) -> int:
        """Wait until the process has ended; returns its exit code."""
        await trio.lowlevel.wait_readable(self.pidfd)
        return self.process.wait()

    def close(self) -> None:
        """Kill the process if it still runs, reap it (this blocks) and close everything."""
        self.process.kill()
        self.process.wait()
        os.close(self.pidfd)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def __enter__(self) -> ShardProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spawn_shard(
    argv: Sequence[str],
    endpoints: Endpoints,
    *,
    env: Mapping[str, str] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    extra_fds: Sequence[int] = (),
) -> ShardProcess:
    """Start `argv`, which has to contain `endpoints.spec.text()`; it inherits the descriptors.

    `stdout` and `stderr` as for `subprocess.Popen` (PIPE to read them). `extra_fds` are inherited
    too, such as rank 0's channels to its followers. Blocks for the fork and exec, a few
    milliseconds. Raises RuntimeError off the main thread: the kernel kills the child when the
    thread that spawned it ends, and threads of pools end after some idle seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("spawn_shard must run in the main thread: the child dies with it")
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=None if env is None else dict(env),
        pass_fds=(*endpoints.spec.fds, *extra_fds),
        process_group=0,  # Ctrl-C in a terminal is the router's to handle: it drains first
    )
    return ShardProcess.of(process)
