"""Which jobs of a sandbox get a process of their own, how they end, and who waits for that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_PROGRAM = """
import os
from tgi_trio.sandbox.zygote import JobLimits, serve_jobs

def job(question, data):
    if question == "wrong":
        raise ValueError("it is wrong")
    return os.getpid()

limits = JobLimits(60.0, 60.0, 1 << 28)
serve_jobs(lambda: job, limits, harmless=lambda question: question != "risky")
"""


@contextmanager
def zygote(program: str) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Run one; yields a function that writes lines to it and returns its next answer."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    told, answers = process.stdin, process.stdout

    def tell(lines: str) -> dict[str, Any]:
        told.write(lines)
        told.flush()
        answer: dict[str, Any] = json.loads(answers.readline())
        return answer

    try:
        assert tell("") == {"value": None}
        yield tell
    finally:
        process.kill()
        process.communicate()


def test_a_harmless_job_is_answered_without_a_child() -> None:
    with zygote(_PROGRAM) as tell:
        own, apart, wrong, again = (
            tell(json.dumps({"job": question, "bytes": 0}) + "\n")
            for question in ("harmless", "risky", "wrong", "harmless")
        )
    assert own == again and own.keys() == apart.keys() == {"value"} and own != apart
    assert wrong == {"wrong": "it is wrong"}


_TAKES = """
from tgi_trio.sandbox.zygote import JobLimits, serve_jobs

limits = JobLimits(60.0, 60.0, 1 << 28)
take = lambda question, data: len(bytearray(question))
serve_jobs(lambda: take, limits, harmless=lambda question: question % 2 == 0)
"""


def test_a_job_without_a_child_has_no_more_memory_than_one_with_it() -> None:
    with zygote(_TAKES) as tell:
        for size in (1 << 27, (1 << 27) + 1):
            line = '{"job": %d, "bytes": 0}\n'
            assert tell(line % (1 << 29 | size & 1)) == {"signal": signal.SIGABRT}
            assert tell(line % size) == {"value": size}


_SLEEPS = """
import time
from tgi_trio.sandbox.zygote import JobLimits, serve_jobs

limits = JobLimits(60.0, 7200.0, 1 << 28)
serve_jobs(lambda: lambda question, data: time.sleep(question) or len(data), limits)
"""
_LONG, _SHORT, _NOBODY_WAITS = '{"job": 3600, "bytes": 0}\n', '{"job": 0, "bytes": 3}\n', "null\n"


def test_a_job_is_abandoned_before_its_child_is_made_and_behind_it() -> None:
    """What is told at a time is read at once, before anything is forked."""
    with zygote(_SLEEPS) as tell:
        assert tell(_LONG + _NOBODY_WAITS) == {"signal": signal.SIGKILL}
        assert tell(_SHORT + "abc") == {"value": 3}
        assert tell(_NOBODY_WAITS + _SHORT + "abc") == {"value": 3}  # that one had its answer


_ABANDONED = """
import os, time
from tgi_trio.sandbox.zygote import JobLimits, serve_jobs

fork = os.fork
told, tell = os.pipe()

def fork_while_nobody_waits_any_more():
    child = fork()
    if child:
        os.write(tell, b"null\\n")
    return child

os.fork = fork_while_nobody_waits_any_more
os.write(tell, b'{"job": null, "bytes": 0}\\n')
os.dup2(told, 0)
serve_jobs(lambda: lambda question, data: time.sleep(3600), JobLimits(60.0, 7200.0, 1 << 28))
"""


def test_a_job_is_abandoned_while_its_child_is_made() -> None:
    """Which takes tens of milliseconds of a large process."""
    with zygote(_ABANDONED) as tell:
        assert tell("") == {"signal": signal.SIGKILL}


_UNDYING = """
import os, signal, time
from tgi_trio.sandbox.zygote import JobLimits, serve_jobs

os.kill = lambda child, number: None
os._exit = lambda code: time.sleep(3600)
limits = JobLimits(60.0, {wall}, 1 << 28)
serve_jobs(lambda: lambda question, data: time.sleep(question) or len(data), limits, patient=True)
"""


def test_no_answer_waits_until_its_child_has_ended() -> None:
    """As where all cores are busy, and it may use only idle ones."""
    with zygote(_UNDYING.format(wall=7200.0)) as tell:
        assert tell(_SHORT + "abc") == {"value": 3}
        assert tell(_LONG + _NOBODY_WAITS) == {"signal": signal.SIGKILL}
        assert tell(_SHORT + "abc") == {"value": 3}
    with zygote(_UNDYING.format(wall=0.1)) as tell:
        assert tell(_LONG) == {"signal": signal.SIGALRM}
        assert tell(_LONG) == {"signal": signal.SIGALRM}


_PATIENT = """
import os, signal, threading
from tgi_trio.sandbox.zygote import JobLimits, serve_jobs

moved = []
os.sched_setscheduler = lambda thread, policy, given: moved.append(policy)

def work(question, data):
    signal.signal(signal.SIGPROF, signal.SIG_IGN)  # as where it is late
    while threading.active_count() > 1:  # somebody looks how long this takes
        pass
    return moved

serve_jobs(lambda: work, JobLimits({cpu}, 7200.0, 1 << 28), patient=True)
"""


@pytest.mark.parametrize(("cpu", "moved"), [(60.0, [os.SCHED_IDLE]), (0.1, [])])
def test_only_a_job_that_may_take_long_is_moved_to_idle_cores(cpu: float, moved: list[int]) -> None:
    """One of few milliseconds was before it had come to its limit, and did not reach that then."""
    with zygote(_PATIENT.format(cpu=cpu)) as tell:
        assert tell('{"job": null, "bytes": 0}\n') == {"value": moved}


_COUNTED = """
import os
from pathlib import Path
from tgi_trio.sandbox.zygote import JobLimits, serve_jobs

own = os.getpid()
children = Path(f"/proc/{own}/task/{own}/children")
limits = JobLimits(60.0, 7200.0, 1 << 28)
serve_jobs(lambda: lambda question, data: len(children.read_text().split()), limits)
"""


def test_a_job_begins_when_the_last_one_has_ended() -> None:
    """Both would write into the same file of results."""
    with zygote(_COUNTED) as tell:
        for _ in range(20):
            assert tell('{"job": null, "bytes": 0}\n') == {"value": 1}
