"""Commands that serve nothing, ended by a signal: without a word, and not as if they were done."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tgi_trio import demo


def start(*words: str, deaf: bool = False) -> subprocess.Popen[str]:
    """Start a command in a process group of its own; `deaf`: as a script's `command &`."""

    def begin() -> None:  # however this run itself was started
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-m", "tgi_trio", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=begin,
    )


def end(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    """Send a signal to the group; return the exit code and standard error."""
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def until(happened: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    give_up = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "deaf"),
    [
        (signal.SIGINT, False),
        (signal.SIGTERM, False),
        (signal.SIGHUP, False),
        (signal.SIGTERM, True),
    ],
)
def test_a_benchmark_that_is_stopped_has_not_succeeded(number: signal.Signals, deaf: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = start("bench", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}", deaf=deaf)
        client, _ = silent.accept()
        with client:
            assert end(process, number) == (-number if deaf else 128 + number, "")


def test_quantising_that_is_stopped_says_nothing_and_leaves_nobody(tmp_path: Path) -> None:
    process = start("quantize", str(demo.model_path()), str(tmp_path / "out"))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: bool(children.read_text()))
    (child,) = map(int, children.read_text().split())
    until(lambda: b"quantising" in Path(f"/proc/{child}/cmdline").read_bytes())
    assert end(process, signal.SIGINT) == (130, "")
    until(lambda: not Path(f"/proc/{child}").exists())
