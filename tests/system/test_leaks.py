"""kill -9 of anybody at any moment leaves no process and no shared memory."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import httpx
import pytest

from tests.system.client import get, post, post_stream
from tests.system.server import ServerProcess, alive, serving, wait_gone
from tgi_trio.testing.segments import names_in_shm, names_left

pytestmark = pytest.mark.system

FAKE = '{"step_ms": 2, "load_ms": 100}'
VICTIMS = ("router", "shard", "both", "group")


def read_until_it_breaks(server: ServerProcess) -> None:
    body = {"inputs": "x", "parameters": {"max_new_tokens": 900}}
    try:
        with post_stream(f"{server.url}/generate_stream", json=body) as reply:
            for _ in reply.iter_lines():
                pass
    except httpx.TransportError:
        return  # killed under us: what the test is about


def kill(server: ServerProcess, victim: str) -> None:
    shards = server.shards()
    if victim in ("shard", "both"):
        for pid in shards:
            os.kill(pid, signal.SIGKILL)
    if victim in ("router", "both"):
        server.signal(signal.SIGKILL)
    if victim == "group":
        os.killpg(server.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", range(4))
def test_five_random_moments_of_death(seed: int) -> None:
    """Four times five: of the start, of the warm-up, of prefill and of decode."""
    rng = random.Random(seed)
    before = names_in_shm()
    for _ in range(5):
        victim = rng.choice(VICTIMS)
        running = rng.random() < 0.5
        with serving(ready=running, fake=FAKE) as server:
            readers = [
                threading.Thread(target=read_until_it_breaks, args=[server])
                for _ in range(4 if running else 0)
            ]
            for reader in readers:
                reader.start()
            time.sleep(rng.random() * (0.1 if running else 0.7))
            family = {server.process.pid, *server.shards()}
            kill(server, victim)
            if victim == "shard" and alive(server.process.pid):
                family |= set(server.shards())
                server.signal(signal.SIGKILL)
            server.wait()
            for reader in readers:
                reader.join(120)
            assert wait_gone(sorted(family)) == [], (victim, running)
        assert not names_left(before), (victim, running)


def test_a_stopped_shard_turns_ready_red_and_a_continued_one_green_again() -> None:
    with serving("--stall-timeout", "4", fake=FAKE) as server:
        (shard,) = server.shards()
        post(f"{server.url}/generate", json={"inputs": "x"})
        os.kill(shard, signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while (ready := get(f"{server.url}/ready")).status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        health, live = (get(f"{server.url}/{path}") for path in ("health", "live"))
        os.kill(shard, signal.SIGCONT)  # within the 4 s after which it would be killed
        assert ready.status_code == health.status_code == 503
        assert "rank 0" in ready.json()["why"] and "no heartbeat" in ready.json()["why"]
        assert live.status_code == 200
        server.wait_ready()
        assert server.shards() == [shard]
