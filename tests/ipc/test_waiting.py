"""Shards that wait for their command line become what they would have been, or end quietly."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shard.loop.scripted_router import channel
from tgi_trio.ipc import waiting
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.waiting import WaitingShards, waiting_shards

PATIENCE = 120.0

# Is in the middle of its first task until its input ends.
CHILD = """
import json, os, sys
from tgi_trio.ipc.waiting import wait_for_words
done = []
def first():
    done.append("first")
    print("begun", flush=True)
    sys.stdin.read()
def files():
    found = map(int, os.listdir("/proc/self/fd"))
    return {n for n in found if os.path.exists(f"/proc/self/fd/{n}")} - {int(sys.argv[1])}
before = files()  # libraries keep some open
words = wait_for_words(int(sys.argv[1]), os.getppid(), [first, lambda: done.append("second")])
print(json.dumps([done, words, sorted(files() - before), os.read(int(words[0]), 9).decode()]))
"""
# A library has a descriptor of the number that is sent.
OCCUPIED = """
import json, os, sys
from tgi_trio.ipc import waiting
end, number = map(int, sys.argv[1:])
os.dup2(os.open(os.devnull, os.O_RDONLY), number)
def execute(path, argv):
    print(json.dumps([argv[1:], os.get_inheritable(number), os.read(number, 9).decode()]))
    sys.exit()
os.execv = execute
waiting.wait_for_words(end, os.getppid(), [])
print("went on")
"""
PARENT = """
import time
from tgi_trio.ipc.waiting import waiting_shards
with waiting_shards(1, "") as shards:
    print(shards._waiting[0].process.pid, flush=True)
    time.sleep(600)
"""


def has_ended(pid: int) -> bool:
    """Wait until a process that may be nobody's child has ended."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # until whoever inherits it looks
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(scope="module")
def spare() -> Iterator[list[waiting._Waiting]]:
    """Processes that wait, all started at once."""
    with waiting_shards(4, "") as shards:
        yield shards._waiting


def test_one_that_waits_is_what_it_would_have_been(spare: list[waiting._Waiting]) -> None:
    shards = WaitingShards([spare.pop()])
    with channel() as (endpoints, router):
        router.hello()
        words = endpoints.spec.text(), ShardSettings(model_path=Path("/nonexistent/model")).text()
        process = shards.take(words, endpoints.spec.fds)
        assert process is not None and process.stdout is not None
        said = process.stdout.read().decode()  # attached, greeted, and refused the model
        assert process.wait(PATIENCE) == 1
        process.stdout.close()
    last = said.strip().splitlines()[-1]
    assert last.startswith("shard 0 cannot go on: ") and "/nonexistent/model" in last
    assert shards.take(words, ()) is None  # there is no other


def test_who_cannot_go_on_is_not_taken(spare: list[waiting._Waiting]) -> None:
    dead, unfit = spare.pop(), spare.pop()
    dead.process.kill()
    dead.process.wait()
    assert WaitingShards([dead]).take(("a", "b"), ()) is None
    # Descriptors of numbers that nobody keeps free.
    assert WaitingShards([unfit]).take(("a", "b"), (waiting._PLACES,)) is None
    assert unfit.process.returncode == -signal.SIGKILL


def test_what_nobody_takes_ends_with_the_block_without_a_word(
    spare: list[waiting._Waiting],
) -> None:
    shard = spare.pop()
    assert shard.process.stdout is not None
    shard.end.close()  # as if the kernel had closed it for a parent that has died
    assert shard.process.wait(PATIENCE) == 0 and shard.process.stdout.read() == b""
    shard.close()
    with pytest.raises(ZeroDivisionError), waiting_shards(1, "") as shards:
        pid = shards._waiting[0].process.pid
        raise ZeroDivisionError
    assert has_ended(pid)


def test_none_outlives_a_launcher_that_is_killed() -> None:
    argv = [sys.executable, "-c", PARENT]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.kill()
    assert has_ended(pid)


def test_tasks_end_when_words_come_and_descriptors_keep_their_numbers() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs:
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        ) as child:
            theirs.close()
            assert child.stdin is not None and child.stdout is not None
            assert child.stdout.readline() == b"begun\n"
            os.write(write, b"through it")
            waiting._send(ours, f'[["{read}", "{"x" * 99_999}"], [{read}]]'.encode(), [read])
            ours.close()
            child.stdin.close()
            done, words, files, said = json.loads(child.stdout.read())
        os.close(read)
        os.close(write)
    assert done == ["first"]
    assert words[0] == str(read) and len(words[1]) == 99_999
    assert files == [read]
    assert said == "through i"


def test_a_descriptor_of_a_library_is_not_replaced_beneath_it() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs:
        with subprocess.Popen(
            [sys.executable, "-c", OCCUPIED, str(theirs.fileno()), str(read)],
            stdout=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        ) as child:
            theirs.close()
            assert child.stdout is not None
            os.write(write, b"through it")
            waiting._send(ours, f'[["spec", "settings"], [{read}]]'.encode(), [read])
            ours.close()
            said = child.stdout.read()
        os.close(read)
        os.close(write)
    assert json.loads(said) == [["-m", "tgi_trio.shard", "spec", "settings"], True, "through i"]


def test_a_launcher_that_dies_in_the_middle_of_it_is_no_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b'[["spec", ')
        ours.close()
        argv = [sys.executable, "-m", "tgi_trio.shard", waiting.WAIT, str(theirs.fileno())]
        done = subprocess.run(
            [*argv, str(os.getpid()), ""],
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_machine_that_refuses_processes_has_none_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts the shards themselves says so; nothing is left open."""

    def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with waiting_shards(2, "") as shards:
        assert not shards._waiting
        assert len(os.listdir("/proc/self/fd")) == before


def test_where_few_descriptors_may_be_open_none_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a process would have no numbers to keep free, and die while it is being taken."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    with waiting_shards(2, "") as shards:
        assert not shards._waiting
