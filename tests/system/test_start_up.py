"""Starts: what they tell (settings, memory, phases), many in a row, and without room for a log."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from bench.harness.server import wait_healthy
from tests.stress import restarts
from tests.support.warm_children import differs
from tests.support.warm_start import EARLY
from tests.system.client import get
from tests.system.server import PATIENCE, serving
from tgi_trio.testing.ports import reserve_port

pytestmark = pytest.mark.system


def test_nothing_that_tests_import_has_shards_of_servers_started_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start costs seconds of a processor then, and there are hundreds."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")  # as parts of torch do
    assert not differs(EARLY, os.environ)
    assert differs(EARLY, {**os.environ, "OMP_NUM_THREADS": "7"})


def test_settings_are_told_in_all_three_places() -> None:
    flags = ("--json-output", "--api-key", "hush", "--max-best-of", "3")
    with serving(*flags, fake="{}") as server:
        output = server.output
        shown = get(f"{server.url}/info").json()["settings"]
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    told = next(record["settings"] for record in records if record["message"] == "settings")
    memory = next(r["memory"] for r in records if r["message"] == "memory in bytes")
    assert told["max_best_of"] == shown["max_best_of"] == 3
    assert told["kv_blocks"] == shown["kv_blocks"] > 0
    assert {"weights", "activations", "KV cache", "spare"} == memory.keys()
    assert "hush" not in output
    assert "hush" not in json.dumps(shown)
    assert "model_path" in told
    assert not [name for name in shown if "path" in name or "file" in name]


def test_tables_and_the_doctor() -> None:
    with serving("--env", fake="{}") as server:
        output = server.output
    assert "ready to serve" in output  # the doctor's last line
    assert "  max_best_of                    default    2\n" in output
    assert "\nMemory\n" in output
    assert "KV blocks of" in output
    (phases,) = re.findall("start-up: (.*)", output)
    named = [phase.rsplit(" ", 2)[0] for phase in phases.split(", ")]
    in_turn = ["imported", "model found", "shard spawned", "shard loading", "shard warming"]
    assert [name for name in named if name != "router loaded"] == [
        *in_turn, "shard ready", "listening",
    ]  # fmt: skip


FIRST_SPAWN = """
import os, sys
from tgi_trio.__main__ import serve
from tgi_trio.cli.parser import parse

def spawned(spec, settings):
    late = (
        "tgi_trio.router.engine.engine",
        "tgi_trio.router.assembly",
        "quart",
        "hypercorn",
        "tokenizers",
    )
    print("loaded:", *(name for name in late if name in sys.modules), flush=True)
    os._exit(0)

serve(parse(["--hostname", "127.0.0.1", "--port", "0"], {}), spawned)
"""


def test_the_shard_is_spawned_before_the_web_stack_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_SPAWN], capture_output=True, text=True, timeout=240
    )
    assert done.stdout.splitlines() == ["loaded:"], done.stderr


COLLECTING = """
import gc, os, weakref
import trio
from tgi_trio.router import assembly
from tgi_trio.testing import fake_server

class Garbage:
    def __init__(self):
        self.itself = self

async def listening(*args, **kwargs):
    garbage = [Garbage() for _ in range(1000)]
    one = weakref.ref(garbage.pop())
    del garbage
    while one() is not None:
        await trio.sleep(0.01)
    print(during, gc.isenabled(), gc.get_freeze_count() > 1000, flush=True)
    os._exit(0)

def loading(*args, load=assembly.load_chat_template):
    global during
    during = gc.isenabled()
    return load(*args)

assembly.serve, assembly.load_chat_template = listening, loading
fake_server.main(["{}", "--hostname", "127.0.0.1", "--port", "0"])
"""


def test_garbage_is_looked_for_from_the_first_request_on() -> None:
    """By a task, no longer by Python: it was off while the server started, and stays off."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECTING], capture_output=True, text=True, timeout=240
    )
    assert done.stdout.split()[-3:] == ["False", "False", "True"], done.stderr


def test_three_starts_in_a_row_on_one_port() -> None:
    seconds: list[tuple[float, float]] = []
    restarts.run(3, False, seconds)
    assert len(seconds) == 3


def test_a_full_disk_under_the_log_is_no_reason_not_to_serve() -> None:
    argv = [sys.executable, "-m", "tgi_trio.testing.fake_server", "{}"]
    with reserve_port() as port:
        with open("/dev/full", "wb") as full:
            process = subprocess.Popen([*argv, "--port", str(port)], stdout=full, stderr=full)
        try:
            wait_healthy(port, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()
