"""What a server's processes hold and use, and what it says of itself."""

from __future__ import annotations

import os
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Vitals:
    """Of one process at one moment."""

    rss: int  # bytes
    descriptors: int
    threads: int


def vitals(pid: int) -> Vitals:
    """Read them; raises OSError when the process is gone."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return Vitals(
        rss=int(status["VmRSS"].split()[0]) * 1024,
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
    )


def children(pid: int) -> list[int]:
    """Return the direct children of a process, oldest first."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            found |= {int(child) for child in (task / "children").read_text().split()}
    return sorted(found)


def find_shards(pid: int) -> list[int]:
    """Return those of a server's children that are shards, oldest first, real or not."""
    found = []
    for child in children(pid):
        with suppress(OSError):  # it has ended meanwhile
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"-m" in words[:-1] and words[words.index(b"-m") + 1].endswith(b"shard"):
                found.append(child)
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process's threads, those that have ended included.

    In the scheduler's nanoseconds; the clock's number is made as glibc's clock_getcpuclockid does.
    Raises OSError when the process is gone.
    """
    return time.clock_gettime((~pid << 3) | 2)


def session_seconds(leader: int) -> float:
    """Return the CPU time of all processes that run in a session."""
    found = 0.0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                if os.getsid(int(folder.name)) == leader:
                    found += cpu_seconds(int(folder.name))
    return found


def still_running(pids: list[int], timeout: float = 60.0) -> list[int]:
    """Return those of `pids` that have not ended within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def metrics(port: int) -> dict[str, float]:
    """Return every series of /metrics by its name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}
