"""Limits of the control groups that this process is in, and of those around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tgi_trio.shard.machine import cgroups, memory

ONE, TWO = "4:memory:{0}\n3:cpu,cpuacct:{0}\n", "0::{0}\n"  # of /proc/self/cgroup, by versions


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which the files of groups lie."""
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "root")
    monkeypatch.setattr(cgroups, "_OWN", tmp_path / "own")
    return tmp_path / "root"


def write(group: Path, own: str, files: dict[str, str]) -> None:
    """Write files of groups, and in which group this process is."""
    (group.parent / "own").write_text(own)
    for name, text in files.items():
        (group / name).parent.mkdir(parents=True, exist_ok=True)
        (group / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        (TWO.format("/"), {}, None),
        (TWO.format("/"), {"cpu.max": "max 100000"}, None),
        (TWO.format("/"), {"cpu.max": "250000 100000"}, 2),
        (TWO.format("/"), {"cpu.max": "50000 100000"}, 0),
        (TWO.format("/"), {"cpu.max": "nonsense"}, None),
        # A unit of systemd's, limited itself and with all others of its slice.
        (
            TWO.format("/a.slice/b.service"),
            {"a.slice/cpu.max": "400000 100000", "a.slice/b.service/cpu.max": "300000 100000"},
            3,
        ),
        (
            TWO.format("/a.slice/b.service"),
            {"a.slice/cpu.max": "200000 100000", "a.slice/b.service/cpu.max": "max 100000"},
            2,
        ),
        (
            ONE.format("/"),
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            None,
        ),
        (
            ONE.format("/batch/7"),
            {
                "cpu/batch/7/cpu.cfs_quota_us": "400000",
                "cpu/batch/7/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        # A container of version 1 sees the host's name of its group, and its own at the root.
        (
            ONE.format("/docker/1"),
            {"cpu/cpu.cfs_quota_us": "600000", "cpu/cpu.cfs_period_us": "100000"},
            6,
        ),
        (ONE.format("/"), {"cpu/cpu.cfs_quota_us": "400000"}, None),
    ],
)
def test_a_quota_is_the_least_of_all_groups(
    group: Path, own: str, files: dict[str, str], quota: int | None
) -> None:
    write(group, own, files)
    assert cgroups.read_quota() == quota


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        (TWO.format("/"), {}, None),
        (TWO.format("/"), {"memory.max": "max", "memory.current": "5"}, None),
        (TWO.format("/"), {"memory.max": "9", "memory.current": "5"}, 4),
        (TWO.format("/"), {"memory.max": "5", "memory.current": "9"}, 0),
        # What files have left in memory is given back.
        (
            TWO.format("/a/b"),
            {
                "a/memory.max": "100",
                "a/memory.current": "90",
                "a/memory.stat": "anon 10\ninactive_file 30\nactive_file 50",
                "a/b/memory.max": "max",
                "a/b/memory.current": "90",
            },
            40,
        ),
        (
            ONE.format("/unit"),
            {
                "memory/unit/memory.limit_in_bytes": "100",
                "memory/unit/memory.usage_in_bytes": "80",
                "memory/unit/memory.stat": "inactive_file 1\ntotal_inactive_file 5",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "80",
            },
            25,
        ),
    ],
)
def test_free_memory_is_the_least_of_all_groups(
    group: Path, own: str, files: dict[str, str], free: int | None
) -> None:
    write(group, own, files)
    assert cgroups.free_bytes() == free
    whole = memory._meminfo_available()
    assert memory.free_bytes() == (free if free is not None else pytest.approx(whole, rel=0.2))


def test_without_control_groups_there_is_no_limit(group: Path) -> None:
    assert cgroups.read_quota() is None and cgroups.free_bytes() is None
