"""How a shard ends, mostly as a process of its own, and what it says then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from tests.shard.loop.scripted_router import BLOCK, PROMPT, answer, channel, row
from tgi_trio.errors import PeerGone
from tgi_trio.ipc.channel import ShardEnd
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.spawn import spawn_shard
from tgi_trio.settings.records import ShardOptions
from tgi_trio.shard.loop import worker
from tgi_trio.testing.fake_model import FakeRunner, FakeSettings


def run_shard(arguments: Callable[[str], list[str]]) -> tuple[int, str]:
    """Run `python -m tgi_trio.shard` on a channel whose router says HELLO; code and stderr."""
    with channel() as (endpoints, router):
        router.hello()
        argv = [sys.executable, "-m", "tgi_trio.shard", *arguments(endpoints.spec.text())]
        with spawn_shard(argv, endpoints, stderr=subprocess.PIPE) as child:
            assert child.process.stderr is not None
            code = child.process.wait(timeout=120)
            return code, child.process.stderr.read().decode()


def test_bad_arguments_end_with_2_and_say_what_is_allowed() -> None:
    code, errors = run_shard(lambda spec: [spec])
    assert code == 2 and "usage" in errors
    code, errors = run_shard(lambda spec: [spec, '{"model": "x"}'])
    assert code == 2 and "'model'" in errors and "model_path, dtype" in errors


def test_a_model_that_cannot_be_loaded_is_the_last_word() -> None:
    settings = json.dumps({"model_path": "/nonexistent/model"})
    code, errors = run_shard(lambda spec: [spec, settings])
    assert code == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith("shard 0 cannot go on: ") and "/nonexistent/model" in last


ABORTS = """
import os, sys
from tgi_trio.settings.records import ShardOptions
from tgi_trio.shard import process

class Held:
    def __del__(self):
        os.abort()

def load():
    held = Held()
    raise RuntimeError("the device is lost")

def dismiss():
    print("dismissed", file=sys.stderr)

process.serve(sys.argv[1], load, ShardOptions(), dismiss=dismiss)
"""


def test_what_a_failed_shard_holds_is_not_taken_apart() -> None:
    """Memory of a lost device ends the process when it goes, before anybody can say why."""
    with channel() as (endpoints, router):
        router.hello()
        argv = [sys.executable, "-c", ABORTS, endpoints.spec.text()]
        with spawn_shard(argv, endpoints, stderr=subprocess.PIPE) as child:
            assert child.process.stderr is not None
            code = child.process.wait(timeout=60)
            errors = child.process.stderr.read().decode()
    last = "shard 0 cannot go on: RuntimeError: the device is lost\ndismissed\n"
    assert (code, errors.endswith(last)) == (1, True), errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_the_whole_service_does_not_end_a_shard(number: int) -> None:
    """Its router drains first; a service manager may signal every process of the service."""
    with channel() as (endpoints, router):
        argv = [sys.executable, "-m", "tgi_trio.testing.fake_shard", endpoints.spec.text()]
        with spawn_shard([*argv, json.dumps({"block_size": BLOCK})], endpoints) as child:
            router.start()
            os.kill(child.pid, number)
            router.prefill(row(1, PROMPT, 6))
            router.finished(1)
            router.send(FrameKind.SHUTDOWN)
            assert child.process.wait(timeout=120) == 0
    assert router.tokens(1) == answer(PROMPT, 6)


def test_the_death_of_the_router_ends_the_loop_quietly() -> None:
    class Orphan(ShardEnd):
        def wait(self, timeout: float | None) -> bool:
            raise PeerGone("router (pid 1)", "it died")

    with channel() as (endpoints, router):
        router.hello()
        end = Orphan.attach(endpoints.spec.text())
        worker.run(end, lambda: FakeRunner(FakeSettings()), ShardOptions())
        assert np.frombuffer(router.end.try_receive() or b"", "<u8")[0] == FrameKind.HELLO
