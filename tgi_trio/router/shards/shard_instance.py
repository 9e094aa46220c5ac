"""One incarnation of a shard: its process, its control page, and its last lines of output."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import trio

from tgi_trio.ipc.control import ControlPage, Vitals
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.frames import Phase
from tgi_trio.ipc.shard_output import split_warning
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.spawn import ShardProcess, spawn_shard
from tgi_trio.ipc.waiting import WaitingShards
from tgi_trio.ipc.watch import wait_for_death

log = logging.getLogger("tgi_trio.shard")

LAST_LINES = 50  # kept for the report of a shard that dies
MAX_LINE = 4096  # bytes; longer lines of output are cut

# The usual causes of some signals, for reports.
LIKELY_CAUSES: Mapping[int, str] = {
    signal.SIGKILL: "killed from outside; without an operator that is usually the kernel running "
    "out of memory: use a smaller model or --dtype bfloat16, or lower --max-batch-total-tokens",
    signal.SIGSEGV: "a fault in native code (torch or one of its libraries)",
    signal.SIGBUS: "memory behind a mapping vanished: a full disk or a truncated weights file",
    signal.SIGILL: "an instruction this processor does not have: the installed torch does not fit",
    signal.SIGABRT: "native code gave up; its message is in the output above",
}

ShardArgv = Callable[[str, str], list[str]]  # (channel spec, settings as JSON) -> command line


def real_shard(spec: str, settings: str) -> list[str]:
    """Return the command line of a shard that serves a model."""
    return [sys.executable, "-m", "tgi_trio.shard", spec, settings]


class ShardInstance:
    """A running shard process on this machine."""

    def __init__(self, process: ShardProcess, page: ControlPage) -> None:
        self.process = process
        self.page = page
        self.rank = page.rank
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._rest = b""

    @classmethod
    @contextmanager
    def spawn(
        cls,
        argv: ShardArgv,
        settings: ShardSettings,
        endpoints: Endpoints,
        fds: Sequence[int],
        waiting: WaitingShards | None = None,
    ) -> Iterator[ShardInstance]:
        """Start the process at the shard's end of `endpoints`; it inherits `fds` as well.

        A pre-started process of `waiting` is used instead, if there is one. Leaving the context
        kills the process if it still runs. Main thread only.
        """
        words = endpoints.spec.text(), settings.text()
        early = None if waiting is None else waiting.take(words, (*endpoints.spec.fds, *fds))
        with (
            spawn_shard(
                argv(*words),
                endpoints,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                extra_fds=fds,
            )
            if early is None
            else ShardProcess.of(early)
        ) as process:
            stdout = process.process.stdout
            if stdout is not None:
                os.set_blocking(stdout.fileno(), False)
            yield cls(process, endpoints.page)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def vitals(self) -> Vitals:
        """The shard's present heartbeat, phase and step."""
        return self.page.vitals

    def describe(self) -> str:
        """Return rank, pid, phase and step, for error messages."""
        return self.page.describe_shard()

    async def wait_for_death(self) -> None:
        """Return when the shard has died, or closed its channel."""
        await wait_for_death(self.process.pidfd, self.page)

    async def wait_for_end(self) -> None:
        """Return when its process has ended."""
        await trio.lowlevel.wait_readable(self.process.pidfd)

    @property
    def has_ended(self) -> bool:
        return self.process.process.poll() is not None

    def kill(self) -> None:
        """SIGKILL it; harmless if it has ended."""
        self.process.kill()

    async def finish(self) -> str:
        """Wait until the process has ended and return the report of its end."""
        code = await self.process.reap()
        self.drain_output()
        return self.report(code, Phase(min(self.vitals.phase, Phase.STOPPING)).name)

    async def pump_output(self) -> None:
        """Log the shard's output line by line and keep the last lines, until it closes."""
        while True:
            await trio.lowlevel.wait_readable(self._stdout_fd)
            if not self._read_output():
                return

    def drain_output(self) -> None:
        """Read the rest of the pipe of a shard that has died."""
        while self._read_output():
            pass

    @property
    def _stdout_fd(self) -> int:
        stdout = self.process.process.stdout
        if stdout is None:
            raise RuntimeError("the shard was spawned without a pipe for its output")
        return stdout.fileno()

    def _read_output(self) -> bool:
        """Read once; False at the end or when nothing is there."""
        try:
            data = os.read(self._stdout_fd, 65536)
        except BlockingIOError:
            return False
        *lines, rest = (self._rest + data).split(b"\n")
        if not data and rest:
            lines, rest = [rest], b""
        self._rest = rest[-MAX_LINE:]
        for line in lines:
            warns, text = split_warning(line[:MAX_LINE].decode("utf-8", "replace"))
            self.last_lines.append(text)
            log.log(logging.WARNING if warns else logging.INFO, "shard %d | %s", self.rank, text)
        return bool(data)

    def report(self, exit_code: int, phase: str) -> str:
        """Return what an operator needs to know about its death, as one block of text."""
        lines = [f"    {line}" for line in self.last_lines]
        what, cause = describe_exit(exit_code)
        return "\n".join(
            [
                f"shard rank {self.rank} (pid {self.process.pid}) {what} in phase {phase}.",
                *([f"Likely cause: {cause}."] if cause else []),
                "Its last lines of output:" if lines else "It has printed nothing.",
                *lines,
            ]
        )


def describe_exit(code: int) -> tuple[str, str]:
    """Return (what happened, likely cause or "") for a Popen return code."""
    if code >= 0:
        return f"exited with code {code}", ""
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    words = signal.strsignal(-code) or "unknown signal"
    return f"was ended by {name} ({words})", LIKELY_CAUSES.get(-code, "")
