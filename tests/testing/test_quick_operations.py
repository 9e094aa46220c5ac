"""Triton's interpreter finds the same, to the bit, when it is made fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


def results(*words: str) -> dict[str, list[str]]:
    argv = [sys.executable, "-m", "tests.testing.quick_results", *words]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    told = subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=240)
    found: dict[str, list[str]] = json.loads(told.stdout)
    return found


def test_operations_find_what_triton_finds() -> None:
    plain, quick = results(), results("hurry")
    assert len(plain) > 400
    assert {name: quick.get(name) for name in plain} == plain
    several = [found for found in plain.values() if len(set(found)) > 1]
    assert len(several) > 200  # other numbers, other results: nothing is kept but the types
