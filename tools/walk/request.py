"""Serves with calls noted, sends one request, and says which files it went through."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.harness.server import serving
from tgi_trio.testing.ports import reserve_port

BODY: Final = {"inputs": "Hello", "parameters": {"max_new_tokens": 20}}
ROUTER, SHARD = "router", "shard"
_LOOP: Final = "shard/loop/worker.py"  # whose calls begin a turn
_LOOK_S: Final = 0.05
_IDLE_S: Final = 60.0  # most seconds until a request leaves nothing to do
# Tasks by their functions. Others look after the server now and then, whoever is served.
_LASTING: Final = ("", "run", "_serve", "send_waiting")  # threads, the acceptor, the engine
_OWN: Final = ("serve_counted", "_answer")  # of a connection, of a request


def stream(port: int) -> None:
    """Ask for one greedy stream and read it to its end."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate_stream",
        json.dumps(BODY).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def wait_idle(port: int) -> None:
    """Wait until the shard has said that it holds nothing of any request."""
    give_up = time.monotonic() + _IDLE_S
    while time.monotonic() < give_up:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_IDLE_S) as answer:
            lines = [line.split() for line in answer.read().decode().splitlines()]
        free, cached, total = (
            sum(float(line[1]) for line in lines if line[0] == name)
            for name in ("tgi_kv_blocks_free", "tgi_prefix_cache_blocks", "tgi_kv_blocks_total")
        )
        if free + cached == total > 0:
            return
        time.sleep(_LOOK_S)
    raise RuntimeError(f"{free:g} free and {cached:g} cached of {total:g} blocks")


def of_one_request(calls: Iterable[Sequence[Any]], began: int) -> list[tuple[int, str]]:
    """Return (nanoseconds, file) of those calls that one request has caused.

    `calls`: nanoseconds, file and task of each, in order; `began`: nanoseconds. Tasks that began
    earlier and end are those of other requests.
    """
    calls = list(calls)
    others = {task for moment, _, task in calls if moment < began}
    found = []
    for moment, file, task in calls:
        function = task.partition(" ")[0]
        if function in _LASTING or (function in _OWN and task not in others):
            found.append((moment, file))
    return [each for each in found if each[0] >= began]


def trace_request(*flags: str) -> list[tuple[str, str]]:
    """Return (process, file) in order of the first call while one request was served.

    `flags` are the server's. The request before it brings what is loaded at the first one.
    """
    with tempfile.TemporaryDirectory() as folder, reserve_port() as port:
        command = [sys.executable, "-m", "tools.walk.traced_server", folder]
        address = ["--hostname", "127.0.0.1", "--port", str(port)]
        with serving([*command, *address, *flags], port, timeout=300.0):
            stream(port)
            wait_idle(port)
            began = time.monotonic_ns()
            stream(port)
            ended = time.monotonic_ns()
        noted = {
            process: of_one_request(
                json.loads((Path(folder) / f"{process}.json").read_text()), began
            )
            for process in (ROUTER, SHARD)
        }
    began = noted[ROUTER][0][0]
    # An idle shard looks around now and then, and may be about it: what counts are whole turns.
    turned = min(moment for moment, file in noted[SHARD] if moment >= began and file == _LOOP)
    first = {ROUTER: began, SHARD: turned}
    calls = [
        (moment, process, file)
        for process, own in noted.items()
        for moment, file in own
        if first[process] <= moment <= ended
    ]
    return list(dict.fromkeys((process, file) for _, process, file in sorted(calls)))
