"""The process that has everything loaded, and forks a child of itself for each job.

What takes seconds to load (a tokenizer, image processors) survives in the parent, whatever the
jobs come to. A job that can harm nobody needs no child. Every question on standard input is a line
of JSON, `{"job": ..., "bytes": n}`, and n bytes. Every answer on standard output is a line of JSON
with one key: `value` of the job, what is `wrong` with the question, or the number of the `signal`
that ended the child: SIGPROF after `cpu` seconds of CPU time, SIGALRM after `wall` seconds without
having had as much, SIGKILL or SIGTERM where somebody else ended it, another where it needed more
than `memory` bytes. The first line says that everything is loaded, or what is wrong with that.

A line `null` ends the job under way: nobody waits for its answer, which comes nevertheless. Whoever
asks has read all answers before the next question, so what the line means depends on nothing but
its place: behind a question it is about that one, and without effect once that is answered.

No answer waits until its child has ended. On a busy machine one that may use only idle cores takes
a minute to die.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from tgi_trio.errors import TgiTrioError
from tgi_trio.ipc.parent import die_with_parent

_NICENESS: Final = 5  # steps and streams go first
_SHORT_S: Final = 0.1  # of CPU time: a patient job that takes more goes on only on idle cores
_LOOK_S: Final = 0.02
_LONGEST: Final = 4096  # bytes of what is wrong
_PIECE: Final = 1 << 16  # bytes read at once
_MOST_ENDING: Final = 4  # children that may still be ending where the next job begins

# What a child computes of a question and its bytes: a JSON value. ValueError: the question's fault.
Job = Callable[[Any, bytes], Any]


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What one job may take."""

    cpu: float  # seconds of CPU time
    wall: float  # seconds
    memory: int  # bytes beyond what the zygote has

    @classmethod
    def parse(cls, argv: list[str]) -> JobLimits:
        """Return the limits of a command line: `cpu`, `wall` and `memory`."""
        cpu, wall, memory = argv
        return cls(float(cpu), float(wall), int(memory))


def serve_jobs(
    load: Callable[[], Job],
    limits: JobLimits,
    *,
    patient: bool = False,
    harmless: Callable[[Any], bool] = lambda question: False,
) -> int:
    """Answer until standard input ends; returns the process's exit code.

    `patient`: jobs that take long go on only where a core is idle; they leave nothing but their
    answers, as the next one may begin before they have ended. `harmless`: whether a question can
    neither end nor hold up a process; it is answered within the same memory without a child, which
    takes tens of milliseconds of a large process.
    """
    for number in (signal.SIGINT, signal.SIGHUP):  # mean the server, which ends this
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    try:
        zygote = _Zygote(load(), limits, patient, harmless, _Input(sys.stdin.fileno()))
    except TgiTrioError as error:
        _tell({"wrong": str(error)})
        return 1
    _tell({"value": None})
    zygote.serve()
    return 0


class _Input:
    """A pipe that is read by lines and by counted bytes, which knows what it has read ahead."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self._ahead = b""

    @property
    def ahead(self) -> bool:
        """Whether something has been read from the pipe that nobody has taken."""
        return bool(self._ahead)

    def take_line(self) -> bytes:
        """Wait for a line and return it; b"" at the end."""
        while (end := self._ahead.find(b"\n")) < 0:
            piece = os.read(self.pipe, _PIECE)
            if not piece:
                return b""
            self._ahead += piece
        line, self._ahead = self._ahead[: end + 1], self._ahead[end + 1 :]
        return line

    def take(self, count: int) -> bytes:
        """Wait for so many bytes and return them; fewer where the pipe ends before."""
        pieces, self._ahead = [self._ahead[:count]], self._ahead[count:]
        missing = count - len(pieces[0])
        while missing and (piece := os.read(self.pipe, min(missing, 1 << 20))):
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)


class _Zygote:
    """Runs jobs, one after the other."""

    def __init__(
        self,
        job: Job,
        limits: JobLimits,
        patient: bool,
        harmless: Callable[[Any], bool],
        source: _Input,
    ) -> None:
        self._job = job
        self._harmless = harmless
        self._limits = limits
        self._patient = patient
        self._source = source
        self._ending: dict[int, int] = {}  # children that nobody waits for, by descriptor (pidfd)

    def serve(self) -> None:
        """Answer until the source ends."""
        while True:
            if not self._source.ahead:
                self._wait_readable([self._source.pipe])
            line = self._source.take_line()
            if not line:
                return
            question = json.loads(line)
            if question is not None:  # else it is about a job that has been answered
                data = self._source.take(question["bytes"])
                _tell(self._run(question["job"], data))

    def _run(self, question: Any, data: bytes) -> dict[str, Any]:
        """Return the answer to a question, or the signal that ended its child."""
        if self._harmless(question):
            with _limited_memory(self._limits.memory):
                return self._compute(question, data)
        if self._source.ahead:  # nobody waits for the answer
            self._source.take_line()
            return {"signal": signal.SIGKILL}
        while len(self._ending) > (_MOST_ENDING if self._patient else 0):
            self._reap(select.select(list(self._ending), [], [])[0])
        reading, writing = os.pipe()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            die_with_parent(parent)
            self._answer(question, data, writing)
        os.close(writing)
        try:
            return self._follow(child, os.pidfd_open(child), reading)
        finally:
            os.close(reading)

    def _follow(self, child: int, pidfd: int, pipe: int) -> dict[str, Any]:
        """Return what a child answers, or the signal that ends it; it may be ending yet."""
        until = time.monotonic() + self._limits.wall
        said, watched = b"", {pipe, pidfd, self._source.pipe}
        self._ending[pidfd] = child
        while not said.endswith(b"\n"):
            ready = self._wait_readable(watched, until)
            if pipe in ready:
                piece = os.read(pipe, _PIECE)
                said += piece
                if not piece:  # it has ended, or is about to
                    watched.remove(pipe)
            elif pidfd in ready:
                code = self._reap([pidfd])
                return {"signal": -code if code < 0 else signal.SIGABRT}
            else:
                os.kill(child, signal.SIGKILL)
                if not ready:
                    return {"signal": signal.SIGALRM}
                self._source.take_line()  # nobody waits for the answer, or is there any more
                return {"signal": signal.SIGKILL}
        found: dict[str, Any] = json.loads(said)
        return found

    def _wait_readable(self, descriptors: Collection[int], until: float | None = None) -> set[int]:
        """Return which of some descriptors can be read; reap children that end meanwhile.

        None of them at `until` (monotonic clock, seconds).
        """
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            others = self._ending.keys() - descriptors
            ready, _, _ = select.select([*descriptors, *others], [], [], left)
            self._reap(others.intersection(ready))
            if (found := set(ready) - others) or not ready:
                return found

    def _reap(self, ended: Iterable[int]) -> int:
        """Forget children that have ended, by descriptor; return the last one's exit code."""
        code = 0
        for pidfd in ended:
            os.close(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(self._ending.pop(pidfd), 0)[1])
        return code

    def _answer(self, question: Any, data: bytes, writing: int) -> NoReturn:
        """Write what the job comes to, within the limits, and end this process."""
        _limit_memory(self._limits.memory)
        signal.setitimer(signal.ITIMER_PROF, self._limits.cpu)  # SIGPROF ends the process
        # A job that may take no more is ended first, though SIGPROF counts in ticks of the kernel,
        # which may be late: on a busy machine it would be held up instead, and come to no verdict.
        if self._patient and self._limits.cpu > _SHORT_S:
            _slow_down_later()
        try:
            _write(writing, self._compute(question, data))
        finally:
            os._exit(0)

    def _compute(self, question: Any, data: bytes) -> dict[str, Any]:
        """Return what the job comes to, as an answer."""
        try:
            return {"value": self._job(question, data)}
        except MemoryError:
            return {"signal": signal.SIGABRT}  # as where nobody can raise it
        except ValueError as error:
            return {"wrong": _cut(str(error))}
        except BaseException as error:  # defects of libraries, llguidance's are PanicExceptions
            return {"wrong": _cut(f"{type(error).__name__}: {error}")}


def _limit_memory(more: int) -> None:
    """Let this process take `more` bytes of address space beyond what it has, for good."""
    most = _address_space() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def _limited_memory(more: int) -> Iterator[None]:
    """Let this process take `more` bytes of address space beyond what it has, within the block."""
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + more, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def _address_space() -> int:
    """Return how many bytes this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _slow_down_later() -> None:
    """Have this thread run only on idle cores once it has worked for a while."""
    worker = threading.get_native_id()

    def watch() -> None:
        while time.process_time() < _SHORT_S:
            time.sleep(_LOOK_S)
        os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))

    threading.Thread(target=watch, daemon=True).start()


def _cut(text: str) -> str:
    return text.encode()[:_LONGEST].decode(errors="ignore")


def _write(pipe: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(pipe, data) :]


def _tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)
