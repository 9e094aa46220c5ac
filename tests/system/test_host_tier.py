"""A second tier of prefixes in the host's memory: conversations go on behind what was evicted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.server import ServerProcess, serving, wait_gone
from tgi_trio.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.system

SPOKEN = "You are router number {}. Between you and the shards there is a ring, and in it a token. "
FAKE = {"blocks": 40, "host_blocks": 100}  # 624 tokens on the device, 1600 in the host's memory
STATES = {**FAKE, "state_slots": 9, "host_slots": 9}


def say(server: ServerProcess, conversation: int, turn: int, times: int) -> tuple[str, int]:
    """Return the answer of a turn, and how many tokens of its prompt were not computed."""
    reply = httpx.post(
        f"{server.url}/generate",
        json={
            "inputs": SPOKEN.format(conversation) * times + "And what of it? " * turn,
            "parameters": {"max_new_tokens": 4},
        },
        timeout=60,
    )
    assert reply.status_code == 200, reply.text
    return reply.json()["generated_text"], int(reply.headers["x-cached-tokens"])


def talk(server: ServerProcess, times: int = 12) -> tuple[list[str], int]:
    """Return what four conversations say in turn, and the cached tokens of all second turns."""
    said = [say(server, i, turn, times) for turn in range(2) for i in range(4)]
    return [text for text, _ in said], sum(cached for _, cached in said[4:])


@pytest.mark.parametrize("fake", [FAKE, STATES], ids=["kv", "states"])
def test_conversations_larger_than_the_device_go_on_where_they_were(fake: dict[str, Any]) -> None:
    """The made-up shard fails whoever finds another's K and V, or states, in a block."""
    less = {name: value for name, value in fake.items() if not name.startswith("host")}
    with serving(fake=json.dumps(less)) as server:
        expected, computed_again = talk(server)
        assert server.metric("tgi_prefix_cache_host_blocks_total") == 0
    with serving(fake=json.dumps(fake)) as server:
        assert "of the host's memory on each rank keep up to 1600 tokens" in server.output
        said, cached = talk(server)
        assert said == expected
        assert cached > 4 * 200 and cached > computed_again + 400
        seen = server.metrics()
        assert seen["tgi_prefix_cache_host_blocks_total"] == 100
        assert 0 < seen["tgi_prefix_cache_host_blocks"] <= 100
        assert seen["tgi_prefix_cache_copied_out_blocks"] > 20
        back = seen["tgi_prefix_cache_copied_back_blocks"]
        assert back > 20 and seen["tgi_prefix_cache_host_hit_tokens"] == 16 * back
        assert seen["tgi_prefix_cache_host_bytes"] > 0
        (shard,) = server.shards()
        os.kill(shard, signal.SIGKILL)  # its memory is gone, and with it the copies
        assert not wait_gone([shard])
        text, cached = say(server, 0, 1, 12)
        assert (text, cached) == (expected[4], 0)
        assert talk(server)[0] == expected


@pytest.mark.parametrize(
    ("family", "others"),
    [("llama", ()), pytest.param("llama", ("--num-shard", "2"), marks=pytest.mark.thorough),
     ("lfm2", ()), ("deepseek_v2", ("--kv-cache-dtype", "fp8_e4m3fn"))],
    ids=["plain", "ranks", "states", "latents"],
)  # fmt: skip
def test_models_say_the_same_behind_what_comes_back(
    family: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    own: dict[str, Any] = {"hidden_size": 128} if family == "lfm2" else {}
    make_checkpoint(tmp_path, family, **own)
    args = ["--model-id", str(tmp_path), "--cpu-backend", "torch", *others]
    with serving(*args, "--prefix-caching", "false") as server:
        expected, none = talk(server, 3)
        assert none == 0
    small = ["--max-batch-total-tokens", "624", "--max-total-tokens", "500"]
    with serving(*args, *small, "--prefix-cache-host-bytes", str(16 << 20)) as server:
        said, cached = talk(server, 3)
        assert said == expected
        assert cached > 4 * 150
        assert server.metric("tgi_prefix_cache_copied_back_blocks") > 20
        assert "gains nothing on a CPU" in server.output


def stop(server: ServerProcess) -> None:
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


@pytest.mark.parametrize("fake", [FAKE, STATES], ids=["kv", "states"])
def test_what_the_host_has_outlives_the_server(fake: dict[str, Any], tmp_path: Path) -> None:
    """Both ways: it is written at an end, and read where the device has no room for it."""
    own, folder = json.dumps(fake), ["--prefix-cache-path", str(tmp_path)]
    with serving(*folder, fake=own) as server:
        expected, _ = talk(server)
        stop(server)
    with serving(*folder, fake=own) as server:
        assert "of them in the host's memory" in server.output
        assert server.metric("tgi_prefix_cache_host_blocks") > 20
        again, _ = talk(server)
        assert again == expected
        assert server.metric("tgi_prefix_cache_host_hit_tokens") > 400
        (shard,) = server.shards()
        os.kill(shard, signal.SIGKILL)  # the next one begins with what was kept at the last end
        assert not wait_gone([shard])
        assert say(server, 0, 1, 12)[1] > 200
        assert talk(server)[0] == expected
        stop(server)
    less = json.dumps({**fake, "host_blocks": 0, "host_slots": 0})
    with serving(*folder, fake=less) as server:  # as much as the device holds
        assert talk(server)[0] == expected


@pytest.mark.parametrize(
    ("family", "others"),
    [("llama", ("--num-shard", "2")), pytest.param("lfm2", (), marks=pytest.mark.thorough)],
    ids=["ranks", "states"],
)
def test_models_say_the_same_behind_copies_that_were_kept(
    family: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    own: dict[str, Any] = {"hidden_size": 128} if family == "lfm2" else {}
    make_checkpoint(tmp_path / "model", family, **own)
    args = ["--model-id", str(tmp_path / "model"), "--cpu-backend", "torch", *others]
    args += ["--max-batch-total-tokens", "624", "--max-total-tokens", "500"]
    args += ["--prefix-cache-host-bytes", str(16 << 20)]
    args += ["--prefix-cache-path", str(tmp_path / "kept")]
    with serving(*args) as server:
        expected, _ = talk(server, 3)
        stop(server)
    with serving(*args) as server:
        assert "of them in the host's memory" in server.output
        for conversation in range(4):
            text, cached = say(server, conversation, 1, 3)
            assert text == expected[4 + conversation]
            assert cached > 150
