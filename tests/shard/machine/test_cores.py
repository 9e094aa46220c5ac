"""How many threads compute, and on which processors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tgi_trio.shard.machine import cores


def test_a_quota_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_quota", lambda: 1)
    assert len(cores.usable_cores()) == 1
    monkeypatch.setattr(cores, "_quota", lambda: 10_000)
    assert set(cores.usable_cores()) <= os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "400000"}, None),
        ({"cpu.max": "nonsense"}, None),
    ],
)
def test_a_quota_is_read_of_both_versions_of_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: int | None
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(cores, "_CGROUPS", tmp_path)
    assert cores._quota() == (len(os.sched_getaffinity(0)) if quota is None else quota)
    assert cores.usable_cores()


def test_a_thread_has_weights_enough_to_be_worth_its_wake_ups(tmp_path: Path) -> None:
    assert cores.sensible_threads(tmp_path, 8) == 1
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(96 << 20)
    assert cores.sensible_threads(tmp_path, 8) == 3
    assert cores.sensible_threads(tmp_path, 2) == 2
