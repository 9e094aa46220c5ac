"""Processes of `tgi_trio.sandbox`: asked one question at a time, replaced when they die of one.

They start when they are needed first, outlive what they are asked, and are never more than a bound.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import trio

from tgi_trio.errors import Overloaded, TgiTrioError
from tgi_trio.process.shortages import tell_shortage

log = logging.getLogger(__name__)

# For a process to load what it needs: four seconds of CPU time for images, at a low priority. Where
# others had all cores a minute was too short, and a server that was to see images did not start.
_START_S = 240.0
_IN_LINE_S = 10.0  # how long a question waits for those before it
_GRACE_S = 10.0  # for a process to say that it has ended a job in time
_LINE = 2**16  # bytes read at once
_PIPE = 1 << 20  # bytes that go to a process before it has to read any
_NOBODY_WAITS = b"null\n"  # in the place of a question
_LONGEST_SAID = 4096  # bytes of a line of its standard error
_KILLS = frozenset({signal.SIGKILL, signal.SIGTERM})  # by an operator, or by want of memory


class SandboxCannotStart(TgiTrioError):
    """A process is not there to be asked; the text says why."""


class SandboxRefused(SandboxCannotStart):
    """The machine has no process to give now: there are too many, no memory, or no time for it."""


class _Ended(Exception):
    """The process has ended instead of answering."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a question."""

    value: Any = None
    wrong: str | None = None  # with the question
    signal: int = 0  # that ended the job: SIGPROF and SIGALRM for time, another for memory

    @property
    def killed(self) -> bool:
        """Whether somebody else has ended the job, which says nothing of it."""
        return self.signal in _KILLS


@dataclass(frozen=True, slots=True)
class Sandbox:
    """How processes of one kind are started."""

    name: str  # in logs
    argv: Sequence[str]
    workers: int  # processes at most
    # Each process gets a file without a name for what is too large for an answer; its descriptor is
    # the last of its arguments.
    results: bool = False
    fds: Sequence[int] = ()  # descriptors that they have under the same numbers


class _Process:
    """One process; it answers one question after the other."""

    def __init__(self, name: str, process: trio.Process, results: int | None) -> None:
        self.results = results
        self._name = name
        self._process = process
        self._rest = b""
        self._begun = b""  # of a line of standard error
        self._owed = 0  # answers that are still to come
        self._sending = False

    @classmethod
    async def start(cls, sandbox: Sandbox) -> _Process:
        """Start one and wait until it is ready; raises SandboxCannotStart."""
        try:
            process, results = await _spawn(sandbox)
        except OSError as error:
            why = tell_shortage(error)
            raise SandboxRefused(f"the process for {sandbox.name} cannot start: {why}") from error
        if isinstance(process.stdin, trio.lowlevel.FdStream):
            with suppress(OSError):  # one user's pipes have taken what the machine allows
                fcntl.fcntl(process.stdin.fileno(), fcntl.F_SETPIPE_SZ, _PIPE)
        self = cls(sandbox.name, process, results)
        wrong: str | None = f"the process for {sandbox.name} is not ready after {_START_S:g} s"
        refused = True
        try:
            with trio.move_on_after(_START_S):
                wrong, refused = (await self._answer()).wrong, False
        except _Ended:
            with trio.move_on_after(_GRACE_S):  # it may have closed its output, and end yet
                await process.wait()
            refused = -(process.returncode or 0) in _KILLS
            wrong = f"the process for {sandbox.name} cannot start"
            if refused:
                wrong = f"the process for {sandbox.name} was killed while it started"
        finally:
            if wrong is not None:
                await self.end()
        if wrong is not None:
            raise SandboxRefused(wrong) if refused else SandboxCannotStart(wrong)
        return self

    @property
    def usable(self) -> bool:
        """Return whether it can be asked: it lives, and has had every question whole."""
        return self._process.poll() is None and not self._sending

    async def ask(self, job: Any, data: bytes | bytearray) -> Answer:
        """Return the answer to a question; raises _Ended."""
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("started without a pipe")
        while self._owed:
            await self._answer()
            self._owed -= 1
        self._sending = True  # left so when cancelled half-way
        try:
            line = json.dumps({"job": job, "bytes": len(data)}).encode() + b"\n"
            if left := line[_write_now(stdin, line) :]:
                await stdin.send_all(left)
            if data:
                await stdin.send_all(data)
        except trio.BrokenResourceError as error:
            raise _Ended from error
        self._sending = False
        self._owed += 1
        answer = await self._answer()
        self._owed -= 1
        return answer

    def abandon(self) -> bool:
        """Have it end the job under way, if there is one: nobody waits for its answer any more.

        Returns False where it cannot be told, as it has not read all of the question yet.
        """
        stdin = self._process.stdin
        if not self._owed or stdin is None:
            return True
        try:
            return _write_now(stdin, _NOBODY_WAITS) == len(_NOBODY_WAITS)
        except _Ended:
            return False

    async def _answer(self) -> Answer:
        stdout = self._process.stdout
        if not isinstance(stdout, trio.lowlevel.FdStream):
            raise RuntimeError("started without a pipe")
        while b"\n" not in self._rest:
            await trio.lowlevel.wait_readable(stdout.fileno())  # it never is there at once
            with suppress(BlockingIOError):
                data = os.read(stdout.fileno(), _LINE)
                if not data:
                    raise _Ended
                self._rest += data
        self._log_errors()
        line, _, self._rest = self._rest.partition(b"\n")
        return Answer(**json.loads(line))

    async def end(self) -> None:
        """End it, whatever it does."""
        with trio.CancelScope(shield=True):  # SIGKILL is not waited for long
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    await stream.aclose()
            self._process.kill()
            await self._process.wait()
            self._log_errors()
            if self._process.stderr is not None:
                await self._process.stderr.aclose()
            if self.results is not None:
                os.close(self.results)
                self.results = None

    def _log_errors(self) -> None:
        """Log what has come on standard error: a panic of a library, a traceback.

        It is looked at with each answer: whoever fills the pipe meanwhile waits, within its time.
        """
        stderr = self._process.stderr
        if not isinstance(stderr, trio.lowlevel.FdStream):
            raise RuntimeError("started without a pipe")
        data = b"..."
        with suppress(BlockingIOError):
            while data:
                data = os.read(stderr.fileno(), _LINE)
                *lines, begun = (self._begun + (data or b"\n")).split(b"\n")
                self._begun = begun[-_LONGEST_SAID:]
                for line in filter(None, lines):
                    said = line[:_LONGEST_SAID].decode(errors="replace")
                    log.warning("%s | %s", self._name, said)


async def _spawn(sandbox: Sandbox) -> tuple[trio.Process, int | None]:
    """Start a process; return it and the descriptor of its results. Raises OSError."""
    results = None
    argv, fds = list(sandbox.argv), list(sandbox.fds)
    if sandbox.results:
        results = os.memfd_create(f"tgi-trio-{sandbox.name}", os.MFD_CLOEXEC)
        argv.append(str(results))
        fds.append(results)
    try:
        process = await trio.lowlevel.open_process(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=fds,
        )
    except BaseException:
        if results is not None:
            os.close(results)
        raise
    return process, results


def _write_now(stream: trio.abc.SendStream, line: bytes) -> int:
    """Write what a pipe takes without waiting; returns how many bytes. Raises _Ended."""
    if not isinstance(stream, trio.lowlevel.FdStream):
        return 0
    try:
        return os.write(stream.fileno(), line)
    except BlockingIOError:
        return 0
    except BrokenPipeError as error:
        raise _Ended from error


class SandboxPool:
    """The processes of one kind."""

    def __init__(self, sandbox: Sandbox, busy: str) -> None:
        """`busy`: what somebody is told who has waited too long for a turn."""
        self._sandbox = sandbox
        self._busy = busy
        self._limiter = trio.CapacityLimiter(sandbox.workers)
        self._idle: list[_Process] = []

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Wait until a process may be used, and keep it for the block; raises Overloaded."""
        try:
            self._limiter.acquire_nowait()
        except trio.WouldBlock:
            with trio.move_on_after(_IN_LINE_S) as waiting:
                await self._limiter.acquire()
            if waiting.cancelled_caught:
                raise Overloaded(self._busy, retry_after=_IN_LINE_S) from None
        try:
            async with Turn(self) as turn:
                yield turn
        finally:
            self._limiter.release()

    async def close(self) -> None:
        """End all processes that wait for work."""
        while self._idle:
            await self._idle.pop().end()

    async def take(self) -> _Process:
        """Return a process that can be asked; raises SandboxCannotStart."""
        while self._idle:
            process = self._idle.pop()
            if process.usable:
                return process
            await process.end()
        return await _Process.start(self._sandbox)

    async def put_back(self, process: _Process, broken: bool) -> None:
        """Keep a process for the next question, unless it is known to be `broken`."""
        if process.usable and not broken and process.abandon():
            self._idle.append(process)
        else:
            await process.end()


class Turn:
    """The right to ask: of one process, which is taken when it is asked first."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self._process: _Process | None = None
        self._broken = False

    async def __aenter__(self) -> Turn:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._process is not None:
            await self._pool.put_back(self._process, self._broken)

    @property
    def results(self) -> int:
        """Descriptor of the file that the last answer may have left something in."""
        if self._process is None or self._process.results is None:
            raise RuntimeError("nothing was asked, or there are no results")
        return self._process.results

    async def begin(self) -> _Process:
        """Return the process, which is ready then; raises SandboxCannotStart."""
        if self._process is None:
            self._process = await self._pool.take()
        return self._process

    async def ask(self, job: Any, data: bytes | bytearray = b"", *, within: float) -> Answer:
        """Return the answer to a question, a JSON value with bytes; raises SandboxCannotStart.

        `within`: seconds after which the process ends the job itself. One that does not even do
        that, or dies, is replaced, and the answer is a signal like any other's.
        """
        process = await self.begin()
        answer = Answer(signal=signal.SIGALRM)
        with trio.move_on_after(within + _GRACE_S):
            try:
                return await process.ask(job, data)
            except _Ended:
                answer = Answer(signal=signal.SIGKILL)
        self._broken = True
        return answer
