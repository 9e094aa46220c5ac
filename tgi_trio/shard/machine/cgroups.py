"""The limits of the control groups that this process is in (cgroups(7)), of both versions. Linux.

A limit holds for a group and for all groups within it. A container sees its own group as the root;
a unit of systemd's, or a process of a batch system, is in a group below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def read_quota() -> int | None:
    """Return our groups' CPU quota in processors, rounded down; None: no limit."""
    found = []
    for group in _groups("cpu"):
        pair = _read(group / "cpu.max") or " ".join(
            _read(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        try:
            quota, period = map(int, pair.split())
        except ValueError:  # nothing is there, or "max": no limit
            continue
        if quota > 0 and period > 0:  # version 1 says -1 for no limit
            found.append(quota // period)
    return min(found, default=None)


def free_bytes() -> int | None:
    """Return the bytes that our groups may still allocate; None: no limit.

    Inactive page cache counts as free, since the kernel reclaims it before it kills a process (as
    in Kubernetes' working set).
    """
    found = []
    for group in _groups("memory"):
        limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
        used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit():  # "max": no limit
            found.append(max(0, int(limit) - int(used) + _unused_file_bytes(group)))
    return min(found, default=None)


def _unused_file_bytes(group: Path) -> int:
    """Return the bytes of inactive page cache of a group and of those within it."""
    told = dict(
        line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines() if " " in line
    )
    value = told.get("total_inactive_file", told.get("inactive_file", "0"))
    return int(value) if value.isdigit() else 0


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of our group and of all above it, which may not be there."""
    for line in _read(_OWN).splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if not names:
            root = _ROOT
        elif controller in names.split(","):
            root = _ROOT / controller
        else:
            continue
        own = root / path.lstrip("/")
        yield own
        yield from (each for each in own.parents if each.is_relative_to(root))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeError):
        return ""
