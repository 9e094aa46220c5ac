"""The memory that this process may use, and its peak use, in bytes. Linux.

No torch in this file; `device_memory.py` has the same for devices.
"""

from __future__ import annotations

from pathlib import Path

from tgi_trio.shard.machine import cgroups


def free_bytes() -> int:
    """Return the bytes that can still be allocated, by the host and by our control groups."""
    free, within = _meminfo_available(), cgroups.free_bytes()
    return free if within is None else min(free, within)


def reset_peak() -> int:
    """Forget the peak so far; return the bytes held now, from which the next one is counted."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak resident set size
    except OSError:
        return _status_bytes("VmHWM:")  # a sandbox may forbid it: count from the old peak
    return _status_bytes("VmRSS:")


def peak_bytes() -> int:
    """Return the most this process has held since `reset_peak`."""
    return _status_bytes("VmHWM:")


def _status_bytes(key: str) -> int:
    return _kib(Path("/proc/self/status"), key)


def _meminfo_available() -> int:
    return _kib(Path("/proc/meminfo"), "MemAvailable:")


def _kib(path: Path, key: str) -> int:
    """Return a value of a "Key:  123 kB" file in bytes, 0 when it is absent."""
    for line in path.read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0
