"""What a start tells: resolved settings, memory and phases, as text, as JSON and at /info."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.system.server import serving

pytestmark = pytest.mark.system


def test_settings_are_told_in_all_three_places() -> None:
    flags = ("--json-output", "--api-key", "hush", "--max-best-of", "3")
    with serving(*flags, fake="{}") as server:
        output = server.output
        shown = httpx.get(f"{server.url}/info").json()["settings"]
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    told = next(record["settings"] for record in records if record["message"] == "settings")
    memory = next(r["memory"] for r in records if r["message"] == "memory in bytes")
    assert told["max_best_of"] == shown["max_best_of"] == 3
    assert told["kv_blocks"] == shown["kv_blocks"] > 0
    assert {"weights", "activations", "KV cache", "spare"} == memory.keys()
    assert "hush" not in output
    assert "hush" not in json.dumps(shown)
    assert "model_path" in told
    assert not [name for name in shown if "path" in name or "file" in name]


def test_tables_and_the_doctor() -> None:
    with serving("--env", fake="{}") as server:
        output = server.output
    assert "ready to serve" in output  # the doctor's last line
    assert "  max_best_of                    default    2\n" in output
    assert "\nMemory\n" in output
    assert "KV blocks of" in output
    assert "start-up: " in output
