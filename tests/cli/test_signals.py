"""Commands that serve nothing, ended by a signal: without a word, and not as if they were done."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tgi_trio import demo

ROOT = Path(__file__).parents[2]


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


def find_script() -> str:
    """Return the statements that run the console script, as installers write them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["tgi-trio"].split(":")
    return f"from {module} import {function}; sys.exit({function}())"


MODULE = 'runpy.run_module("tgi_trio", run_name="__main__", alter_sys=True)'


@pytest.mark.parametrize("begin", [MODULE, find_script()], ids=["module", "script"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_stopped_before_it_has_begun_says_nothing(
    tmp_path: Path, number: signal.Signals, begin: str
) -> None:
    """Python printed where in our imports Ctrl-C had found it."""
    program = f"""
import os, runpy, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "tgi_trio.cli.options":
            os.kill(os.getpid(), {int(number)})
sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["--version"]
{begin}
"""
    assert run(tmp_path, program) == (-number, "", "")


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


NOBODY = ("--url", "http://127.0.0.1:1")
IMPORTING = [("print-schema",), ("--port", "0")]


@pytest.mark.parametrize("words", IMPORTING)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_an_import_waits_for_its_end(
    tmp_path: Path, words: tuple[str, ...], number: signal.Signals
) -> None:
    """orjson ends in a segmentation fault where what it looks up when it is initialised raises."""
    program = f"""
import os, sys, tgi_trio.__main__ as main
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "orjson.orjson":
            sys.modules.pop("uuid", None)
            self.begun = True
        if name == "uuid" and self.begun:
            os.kill(os.getpid(), {int(number)})
    begun = False
sys.meta_path.insert(0, Finder())
sys.exit(main.main({list(words)}))
"""
    told_to_end = words == ("--port", "0") and number == signal.SIGTERM  # no failure of a server
    expected = 0 if told_to_end else 128 + number
    assert run(tmp_path, program) == (expected, "", "")


@pytest.mark.parametrize(
    "words",
    [
        ("print-schema",),
        ("bench", *NOBODY),
        ("chat", *NOBODY),
        ("batch", "/nowhere", "/nowhere/else", *NOBODY),
        ("doctor",),
        ("--model-id", "/nowhere", "--json-output"),
        ("download-weights", "/nowhere"),
        ("front", "--replica", "127.0.0.1:1", "--bind", "unix:/nowhere/socket"),
        ("rank", "--leader", "127.0.0.1:1", "--rank", "1", "--cluster-secret-file", "/nowhere"),
    ],
)
def test_libraries_are_imported_while_signals_wait(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Of others that are not in Python, whose initialisation is not theirs to interrupt."""
    program = f"""
import signal, sys, tgi_trio.__main__ as main
READY = "yaml._yaml"  # which the hub's package imports when it is used
def look(event, given):
    if event != "import" or "site-packages" not in str(given[1]) or given[0] == READY:
        return
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if raises and not held >= {{signal.SIGINT, signal.SIGTERM, signal.SIGHUP}}:
        print("open:", given[0], file=sys.stderr)
    print("seen:", given[0], file=sys.stderr)
sys.addaudithook(look)
sys.exit(main.main({list(words)}))
"""
    told = run(tmp_path, program)[2]
    assert "open:" not in told, told
    assert "seen:" in told or words == ("doctor",)


def stopped(folder: Path, number: int, function: str, *words: str) -> tuple[int, str, str]:
    """Run a command that gets a signal in an `exec` in place of `function`; return its end."""
    program = f"""
import os, sys, tgi_trio.__main__ as main
def stop(*given):
    exec("os.kill(os.getpid(), {int(number)}); [i for i in range(10**6)]")
{function} = stop
sys.exit(main.main({list(words)}))
"""
    return run(folder, program)


def run(folder: Path, program: str) -> tuple[int, str, str]:
    """Run a program of Python as `python -m`: with -c one ends otherwise."""
    (folder / "program.py").write_text(program)
    paths = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    ended = subprocess.run(
        [sys.executable, "-m", "program"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=hear,
    )
    return ended.returncode, ended.stdout, ended.stderr
