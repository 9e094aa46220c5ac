"""A server whose clients take every descriptor that there is."""

from __future__ import annotations

import itertools
import os
import re
import resource
import socket
import time

import httpx
import pytest

from tests.system.client import TIMEOUT, generate, get
from tests.system.server import serving
from tgi_trio.process.descriptors import min_descriptors

pytestmark = pytest.mark.system

FREE = 4  # descriptors that are left to clients
TOKENS = 40
BODY = {"inputs": "x", "parameters": {"max_new_tokens": TOKENS}}


def test_what_is_under_way_is_served_and_others_wait() -> None:
    """Until the longest idle ones make room, after a second; it is no connection's fault."""
    with serving(fake='{"step_ms": 50}') as server:
        with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
            while "tgi_connections 1\n" not in client.get("/metrics").text:
                time.sleep(0.02)  # whoever asked before has not quite left
            with client.stream("POST", "/generate_stream", json=BODY) as answer:
                pid = server.process.pid
                before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
                free = itertools.islice((n for n in itertools.count() if n not in taken), FREE)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(free) + 1, before[1]))
                address = ("127.0.0.1", server.port)
                many = [socket.create_connection(address) for _ in range(2 * FREE)]
                while "no connection can be accepted" not in server.output:
                    time.sleep(0.02)
                assert answer.read().count(b"data:") == TOKENS
            # Those that ask for nothing leave one after the other, for who asks for something.
            asks = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT)
            assert "tgi_connection_shortages 0\n" not in asks.text
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            assert get(f"{server.url}/health").status_code == 200, "who waited is let in"
            while "connections are accepted again" not in server.output:
                time.sleep(0.05)
            for each in many:
                each.close()
        assert "Traceback" not in server.output


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_server_with_no_more_than_it_takes_at_least_answers(ranks: int) -> None:
    """The process that checks grammars, which only starts with the first of them, among it."""
    least = min_descriptors(ranks)
    with serving("--num-shard", str(ranks), ready=False, cold=True) as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (least, least))
        server.wait_ready()
        asked = {"max_new_tokens": 8, "grammar": {"type": "regex", "value": "[ab]{3}"}}
        answer = generate(server.url, "Hello", **asked)
        assert re.fullmatch("[ab]{3}", answer["generated_text"])
