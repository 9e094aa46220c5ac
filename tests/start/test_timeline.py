"""The phases of a start, timed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tgi_trio.start.timeline import Timeline


def test_a_start_is_timed_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: Path, *given: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    before = time.monotonic()
    assert before <= Timeline().origin <= time.monotonic()
