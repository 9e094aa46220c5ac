"""A server whose clients take every descriptor that there is."""

from __future__ import annotations

import itertools
import os
import resource
import socket
import time

import httpx
import pytest

from tests.system.client import TIMEOUT, get
from tests.system.server import serving

pytestmark = pytest.mark.system

FREE = 4  # descriptors that are left to clients
BODY = {"inputs": "x", "parameters": {"max_new_tokens": 8}}


def test_whoever_is_connected_is_served_and_others_wait() -> None:
    with serving(fake="{}") as server:
        kept = httpx.Client(base_url=server.url, timeout=TIMEOUT)
        with kept:
            while "tgi_connections 1\n" not in kept.get("/metrics").text:
                time.sleep(0.02)  # whoever asked before has not quite left
            pid = server.process.pid
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
            free = itertools.islice((n for n in itertools.count() if n not in taken), FREE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(free) + 1, before[1]))
            address = ("127.0.0.1", server.port)
            many = [socket.create_connection(address) for _ in range(4 * FREE)]
            while "no connection can be accepted" not in server.output:
                time.sleep(0.02)
            for _ in range(5):
                with kept.stream("POST", "/generate_stream", json=BODY) as answer:
                    assert answer.read().count(b"data:") == 8
            metrics = kept.get("/metrics").text
            assert "tgi_connection_shortages 1\n" in metrics
            assert f"tgi_connections {1 + FREE}\n" in metrics
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            assert get(f"{server.url}/health").status_code == 200, "who waited is let in"
            while "connections are accepted again" not in server.output:
                time.sleep(0.05)
            for each in many:
                each.close()
        assert server.output.count("no connection can be accepted") == 1
        assert "Traceback" not in server.output
