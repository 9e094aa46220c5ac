"""kill -9 at random moments: no process and no name stays behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from tests.ipc.conftest import CHILDREN, ROOT
from tgi_trio.testing.segments import names_in_shm, names_left

SHARDS = 2


def family(marker: str) -> list[int]:
    """Return the pids of all living processes with `marker` on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if marker.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has just gone
    return found


def kill(who: str, router: int, marker: str) -> None:
    shards = [pid for pid in family(marker) if pid != router]
    victims = {"router": [router], "shard": shards[:1], "both": [*shards[:1], router]}
    if who == "group":
        os.killpg(router, signal.SIGKILL)
    for pid in victims.get(who, []):
        with suppress(ProcessLookupError):  # one that was no shard yet has ended meanwhile
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("who", ["router", "shard", "both", "group"])
def test_nothing_stays_behind(who: str) -> None:
    chance = random.Random(who)
    before = names_in_shm()
    for _ in range(13):
        marker = f"family-{uuid4()}"
        router = subprocess.Popen(
            [sys.executable, str(CHILDREN / "router.py"), str(SHARDS), marker],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        time.sleep(chance.uniform(0, 0.6))  # anywhere from exec to the middle of the traffic
        kill(who, router.pid, marker)
        if who == "shard":  # its router goes on; it is not what is tested here
            router.kill()
        router.wait()
        deadline = time.monotonic() + 120
        while family(marker) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert family(marker) == []
    assert not names_left(before)
