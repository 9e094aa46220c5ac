"""Commands that serve nothing, ended by a signal: without a word, and not as if they were done."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tgi_trio import demo


def hear(deaf: bool = False) -> None:
    """Have a process hear signals however this run itself was started; `deaf`: as `command &`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.SIG_DFL)


def start(*words: str, deaf: bool = False) -> subprocess.Popen[str]:
    """Start a command in a process group of its own; `deaf`: as a script's `command &`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tgi_trio", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=partial(hear, deaf),
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


@pytest.mark.parametrize("words", [("doctor",), ("--port", "0")])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_stopped_while_its_words_are_read_has_not_succeeded(
    tmp_path: Path, words: tuple[str, ...], number: signal.Signals
) -> None:
    """It ended with 0, as a server does that is told to stop."""
    assert stopped(tmp_path, number, "main.parse", *words) == (128 + number, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_exit_code_is_the_signals_wherever_it_comes(
    tmp_path: Path, number: signal.Signals
) -> None:
    """SIGTERM ended it as SIGINT does where it came while a dataclass was made."""
    assert stopped(tmp_path, number, "main._COMMANDS['doctor']", "doctor") == (128 + number, "", "")


def stopped(folder: Path, number: int, function: str, *words: str) -> tuple[int, str, str]:
    """Run a command that gets a signal in an `exec` in place of `function`; return its end."""
    program = f"""
import os, sys, tgi_trio.__main__ as main
def stop(*given):
    exec("os.kill(os.getpid(), {int(number)}); [i for i in range(10**6)]")
{function} = stop
sys.exit(main.main({list(words)}))
"""
    (folder / "stopped.py").write_text(program)
    command = [sys.executable, "-m", "stopped"]  # as `python -m tgi_trio`: -c ends otherwise
    paths = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    ended = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=hear,
    )
    return ended.returncode, ended.stdout, ended.stderr
