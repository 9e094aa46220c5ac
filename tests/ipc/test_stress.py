"""Two real processes: checksums under load, and what a SIGKILL in mid-write leaves behind."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from tests.ipc.conftest import CHILDREN, ROOT
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.fence import find_ordering
from tgi_trio.ipc.router_end import ReplyBell, RouterEnd
from tgi_trio.ipc.spawn import ShardProcess
from tgi_trio.testing.segments import names_in_shm, names_left


@pytest.mark.trio
@pytest.mark.parametrize("ordering", ["lock", "libatomic", "none"])
@pytest.mark.parametrize("spin_us", [0, 30])
async def test_no_byte_changes_and_no_wake_up_is_lost(
    ordering: str,
    spin_us: int,
    make_endpoints: Callable[..., Endpoints],
    spawn_child: Callable[..., ShardProcess],
) -> None:
    if find_ordering(ordering).name != ordering:
        pytest.skip(f"no {ordering} fence on this machine")
    chance = random.Random(spin_us)
    with ReplyBell(poll_us=spin_us) as bell:
        endpoints = make_endpoints(
            reply_bell=bell.fd,
            ordering=find_ordering(ordering),
            spin_us=spin_us,
            request_bytes=16384,
            reply_bytes=8192,
        )
        with RouterEnd(endpoints, bell) as router, trio.fail_after(240):
            child = spawn_child("checksum_echo", endpoints)
            expected: deque[bytes] = deque()
            for _ in range(4000):
                body = chance.randbytes(chance.choice((0, 3, 100, 4000)))
                payload = zlib.crc32(body).to_bytes(4, "little") + body
                while not router.try_send(payload):
                    await receive(router, expected)
                expected.append(payload)
                if chance.random() < 0.3:  # now and then let both sides run dry and fall asleep
                    while expected:
                        await receive(router, expected)
            while expected:
                await receive(router, expected)
            router.check()
            assert router.try_send(b"")
            assert await child.reap() == 0


async def receive(router: RouterEnd, expected: deque[bytes]) -> None:
    """Read what is there, or wait for it; every frame must be the next one expected."""
    while (frame := router.try_receive()) is None:
        await router.wait()
    assert frame == expected.popleft()
    router.release()


def test_a_killed_writer_leaves_no_partial_frame() -> None:
    before = names_in_shm()
    run = subprocess.run(
        [sys.executable, str(CHILDREN / "kill_writers.py"), "200"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    kills, frames, mid_write = map(int, run.stdout.split())
    assert kills == 200
    assert frames > kills
    assert mid_write > 20, "too few kills hit a write: the test shows too little"
    assert not names_left(before)


def system_calls(messages: int, report: Path) -> Counter[str]:
    """Return the system calls of an exchange of `messages` round trips, by name."""
    command = ["strace", "-f", "-qq", "-c", "-o", str(report), sys.executable]
    subprocess.run(
        [*command, str(CHILDREN / "hot_loop.py"), str(messages)],
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    rows = [line.split() for line in report.read_text().splitlines()[2:-2]]
    return Counter({row[-1]: int(row[3]) for row in rows if len(row) >= 5})


@pytest.mark.skipif(
    shutil.which("strace") is None or len(os.sched_getaffinity(0)) < 2,
    reason="needs strace and two cores",
)
def test_a_hot_message_makes_no_system_call(tmp_path: Path) -> None:
    """Two runs that differ by 20,000 messages make the same system calls, give or take start-up."""
    few, many = (system_calls(count, tmp_path / str(count)) for count in (1_000, 21_000))
    per_message = {name: (many[name] - few[name]) / 20_000 for name in many | few}
    assert max(per_message.values()) < 0.005, per_message
    assert many["eventfd2"] == few["eventfd2"] > 0, "strace saw nothing at all"
