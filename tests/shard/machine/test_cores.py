"""How many threads compute, and on which processors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tgi_trio.shard.machine import cores


def test_a_quota_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for quota in (0, 1):
        monkeypatch.setattr(cores, "read_quota", lambda quota=quota: quota)
        assert len(cores.usable_cores()) == 1
    for no_bound in (10_000, None):
        monkeypatch.setattr(cores, "read_quota", lambda quota=no_bound: quota)
        assert 1 <= len(cores.usable_cores()) <= len(os.sched_getaffinity(0))


def test_a_thread_has_weights_enough_to_be_worth_its_wake_ups(tmp_path: Path) -> None:
    assert cores.sensible_threads(tmp_path, 8) == 1
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(96 << 20)
    assert cores.sensible_threads(tmp_path, 8) == 3
    assert cores.sensible_threads(tmp_path, 2) == 2
