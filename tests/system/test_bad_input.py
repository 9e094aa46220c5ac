"""What a user can get wrong, and what the server says to it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm_start import run_warm
from tests.system.client import get, post
from tests.system.server import ServerProcess, serving
from tgi_trio.demo import model_path
from tgi_trio.testing.segments import names_in_shm, names_left

pytestmark = pytest.mark.system


def start(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run a server that is expected to give up by itself."""
    return run_warm("-m", "tgi_trio", "--hostname", "127.0.0.1", *flags)


@pytest.fixture
def broken_model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(model_path(), folder)
    return folder


def test_a_port_in_use_names_the_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = start("--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "--port" in result.stderr and "Traceback" not in result.stderr


def test_an_unknown_model_folder_is_named(tmp_path: Path) -> None:
    result = start("--port", "0", "--model-id", str(tmp_path / "nothing-here"))
    assert result.returncode == 1
    assert "nothing-here" in result.stderr and "Traceback" not in result.stderr


def test_truncated_weights_are_refused_before_a_shard_is_spawned(broken_model: Path) -> None:
    weights = broken_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    before = names_in_shm()
    result = start("--port", "0", "--model-id", str(broken_model))
    assert result.returncode == 1
    assert "model.safetensors" in result.stderr
    assert "it may be truncated: it has 5000 bytes" in result.stderr
    assert "LOADING" not in result.stderr and "Traceback" not in result.stderr
    assert not names_left(before)


def test_a_missing_tensor_is_named(broken_model: Path) -> None:
    config = json.loads((broken_model / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (broken_model / "config.json").write_text(json.dumps(config))
    result = start("--port", "0", "--model-id", str(broken_model))
    assert result.returncode == 1
    assert f"model.layers.{config['num_hidden_layers'] - 1}." in result.stderr


def test_a_shard_that_is_killed_at_the_start_is_reported_in_words() -> None:
    """Of one that loads for a minute: however slow this test is, it comes before that."""
    with serving(ready=False, fake='{"load_ms": 60000}') as server:
        while "shard group: loading" not in server.output:
            assert server.process.poll() is None, server.output
            time.sleep(0.01)
        (shard,) = server.shards()
        os.kill(shard, signal.SIGKILL)
        assert server.wait() == 1
        assert "SIGKILL (Killed)" in server.output


def test_flags_that_cannot_work_are_refused_with_a_sentence() -> None:
    for flags, word in (
        (("--sharded", "true"), "num_shard"),
        (("--quantize", "awq"), "quantize"),
        (("--max-total-tokens", "999999"), "max_total_tokens"),
        (("--no-such-flag",), "--no-such-flag"),
    ):
        result = start("--port", "0", *flags)
        assert result.returncode in (1, 2), flags
        assert word in result.stderr and "Traceback" not in result.stderr, result.stderr


BAD_BODIES: list[tuple[str, Any, int, str]] = [
    ("/generate", b"{", 400, "Failed to parse"),
    ("/generate", {"inputs": 5}, 422, "Failed to deserialize"),
    ("/generate", {"inputs": ""}, 422, "`inputs` cannot be empty"),
    ("/generate", {"inputs": "x " * 3000}, 422, "tokens"),
    ("/generate", {"inputs": "x", "parameters": {"temperature": 0}}, 422, "temperature"),
    ("/v1/chat/completions", {"messages": 3}, 422, "messages"),
    ("/v1/chat/completions", {"messages": [], "model": "nobody"}, 404, "nobody"),
    ("/v1/completions", {"model": "tgi"}, 422, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "status", "text"), BAD_BODIES)
def test_bad_bodies(demo: ServerProcess, path: str, body: Any, status: int, text: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    reply = post(f"{demo.url}{path}", content=content, headers=headers)
    assert reply.status_code == status, reply.text
    assert text in reply.text
    assert get(f"{demo.url}/health").status_code == 200
