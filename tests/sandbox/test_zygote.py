"""Which jobs of a sandbox get a process of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

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


def test_a_harmless_job_is_answered_without_a_child() -> None:
    asked = ["harmless", "risky", "wrong", "harmless"]
    lines = [json.dumps({"job": question, "bytes": 0}) + "\n" for question in asked]
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    said, _ = process.communicate("".join(lines), timeout=240)
    ready, first, apart, wrong, last = map(json.loads, said.splitlines())
    assert ready == {"value": None}
    assert first == last == {"value": process.pid}
    assert apart["value"] != process.pid
    assert wrong == {"wrong": "it is wrong"}


_ABANDONED = """
import os, signal, time
from tgi_trio.sandbox.zygote import JobLimits, serve_jobs

fork, own = os.fork, os.getpid()

def fork_while_nobody_waits_any_more():
    child = fork()
    if child:
        os.kill(own, signal.SIGUSR1)
    return child

os.fork = fork_while_nobody_waits_any_more
serve_jobs(lambda: lambda question, data: time.sleep(3600), JobLimits(60.0, 7200.0, 1 << 28))
"""


def test_a_job_is_abandoned_while_its_child_is_made() -> None:
    """Which takes tens of milliseconds of a large process."""
    process = subprocess.Popen(
        [sys.executable, "-c", _ABANDONED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        said, _ = process.communicate('{"job": null, "bytes": 0}\n', timeout=240)
    finally:
        process.kill()
    assert json.loads(said.splitlines()[1]) == {"signal": signal.SIGKILL}
