"""Serves with calls noted, sends one request, and says which files it went through."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Final

from bench.harness.server import serving
from tgi_trio.testing.ports import reserve_port

BODY: Final = {"inputs": "Hello", "parameters": {"max_new_tokens": 20}}
ROUTER, SHARD = "router", "shard"
_LOOP: Final = "shard/loop/worker.py"  # whose calls begin a turn
_QUIET_S: Final = 1.0  # until all is done that the request before has left to do


def stream(port: int) -> None:
    """Ask for one greedy stream and read it to its end."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate_stream",
        json.dumps(BODY).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def trace_request(*flags: str) -> list[tuple[str, str]]:
    """Return (process, file) in order of the first call while one request was served.

    `flags` are the server's. The request before it brings what is loaded at the first one.
    """
    with tempfile.TemporaryDirectory() as folder, reserve_port() as port:
        command = [sys.executable, "-m", "tools.walk.traced_server", folder]
        address = ["--hostname", "127.0.0.1", "--port", str(port)]
        with serving([*command, *address, *flags], port, timeout=300.0):
            stream(port)
            time.sleep(_QUIET_S)
            began = time.monotonic_ns()
            stream(port)
            ended = time.monotonic_ns()
        noted = {
            process: json.loads((Path(folder) / f"{process}.json").read_text())
            for process in (ROUTER, SHARD)
        }
    began = min(moment for moment, _ in noted[ROUTER] if moment >= began)
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
