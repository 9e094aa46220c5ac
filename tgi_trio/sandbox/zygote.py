"""The process that has everything loaded, and forks a child of itself for each job.

What takes seconds to load (a tokenizer, image processors) survives in the parent, whatever the
jobs come to. A job that can harm nobody needs no child. Every question on standard input is a line
of JSON, `{"job": ..., "bytes": n}`, and n bytes. Every answer on standard output is a line of JSON
with one key: `value` of the job, what is `wrong` with the question, or the number of the `signal`
that ended the child: SIGPROF after `cpu` seconds of CPU time, SIGALRM after `wall` seconds without
having had as much, SIGKILL or SIGTERM where somebody else ended it, another where it needed more
than `memory` bytes. SIGUSR1 ends the job under
way: nobody waits for its answer. The first line says that everything is loaded, or what is wrong
with that.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tgi_trio.errors import TgiTrioError
from tgi_trio.ipc.parent import die_with_parent

_NICENESS = 5  # steps and streams go first
_SHORT_S = 0.1  # of CPU time: a patient job that takes more goes on only where a core is idle
_LOOK_S = 0.02
_LONGEST = 4096  # bytes of what is wrong

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

    `patient`: jobs that take long go on only where a core is idle. `harmless`: whether a question
    can neither end nor hold up a process; it is answered without a child, which takes tens of
    milliseconds of a large process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C means the server, which ends this
    os.nice(_NICENESS)
    try:
        zygote = _Zygote(load(), limits, patient, harmless)
    except TgiTrioError as error:
        _tell({"wrong": str(error)})
        return 1
    _tell({"value": None})
    source = sys.stdin.buffer
    for line in source:
        question = json.loads(line)
        _tell(zygote.run(question["job"], source.read(question["bytes"])))
    return 0


class _Zygote:
    """Runs jobs, one after the other."""

    def __init__(
        self, job: Job, limits: JobLimits, patient: bool, harmless: Callable[[Any], bool]
    ) -> None:
        self._job = job
        self._harmless = harmless
        self._limits = limits
        self._patient = patient
        self._child = 0  # process id while there is one
        signal.signal(signal.SIGUSR1, self._abandon)

    def run(self, question: Any, data: bytes) -> dict[str, Any]:
        """Return the answer to a question, or the signal that ended its child."""
        if self._harmless(question):
            return self._compute(question, data)
        reading, writing = os.pipe()
        parent = os.getpid()
        # Who sends SIGUSR1 meanwhile is heard once it is known whom it ends.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
            die_with_parent(parent)
            self._answer(question, data, writing)
        self._child = child
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        os.close(writing)
        with open(reading, "rb") as pipe:
            answer = pipe.read()
        self._child = 0
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0 or not answer:
            return {"signal": -code or signal.SIGABRT}
        found: dict[str, Any] = json.loads(answer)
        return found

    def _answer(self, question: Any, data: bytes, writing: int) -> NoReturn:
        """Write what the job comes to, within the limits, and end this process."""
        _limit_memory(self._limits.memory)
        signal.setitimer(signal.ITIMER_PROF, self._limits.cpu)  # SIGPROF ends the process
        signal.setitimer(signal.ITIMER_REAL, self._limits.wall)  # and so does SIGALRM
        if self._patient:
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

    def _abandon(self, number: int, frame: object) -> None:
        if self._child:
            os.kill(self._child, signal.SIGKILL)


def _limit_memory(more: int) -> None:
    """Let this process take `more` bytes of address space beyond what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


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
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(pipe, data) :]


def _tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)
