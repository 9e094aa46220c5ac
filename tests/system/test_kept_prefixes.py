"""Computed prefixes outlive the server: the next one begins behind them, and says the same."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.client import generate
from tests.system.server import PATIENCE, ServerProcess, serving, wait_gone
from tgi_trio.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.system

SYSTEM = "You are a router. Between you and the shards there is a ring, and in the ring a token. "
PROMPTS = [SYSTEM * 4 + ask for ask in ("Whose is it?", "What is a step?")] + [SYSTEM * 2]
STATES = {"state_slots": 21, "blocks": 256}  # the made-up shard fails whoever finds wrong ones


def ask(server: ServerProcess, prompt: str) -> tuple[str, int]:
    """Return what a prompt is answered, and how many of its tokens were not computed."""
    reply = httpx.post(
        f"{server.url}/generate",
        json={"inputs": prompt, "parameters": {"max_new_tokens": 12}},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text
    return reply.json()["generated_text"], int(reply.headers["x-cached-tokens"])


def texts(server: ServerProcess) -> list[str]:
    return [ask(server, prompt)[0] for prompt in PROMPTS]


def stop(server: ServerProcess) -> None:
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


def flags(folder: Path, *others: str) -> list[str]:
    return ["--prefix-cache-path", str(folder), *others]


@pytest.mark.parametrize("fake", [{}, STATES], ids=["kv", "states"])
def test_prefixes_are_there_after_a_restart_and_after_a_crash(
    fake: dict[str, Any], tmp_path: Path
) -> None:
    own = json.dumps(fake)
    with serving(*flags(tmp_path), fake=own) as server:
        said = texts(server)
        stop(server)
        assert "tokens are kept in" in server.output
    with serving(*flags(tmp_path), fake=own) as server:
        assert "of earlier prompts are there again" in server.output
        assert ask(server, PROMPTS[0])[1] > 80
        assert texts(server) == said
        (shard,) = server.shards()
        os.kill(shard, signal.SIGKILL)  # what it has computed since is lost, the files are not
        assert not wait_gone([shard])
        text, cached = ask(server, PROMPTS[0])
        assert text == said[0] and cached > 80
        server.wait_idle()
        server.signal(signal.SIGKILL)  # nothing is written then, and nothing lost
        server.wait()
    with serving(*flags(tmp_path), fake=own) as server:
        text, cached = ask(server, PROMPTS[0])
        assert text == said[0] and cached > 80
        stop(server)  # kept again, with what was kept before
    with serving(*flags(tmp_path), fake=own) as server:
        assert ask(server, PROMPTS[1])[1] > 80


@pytest.mark.parametrize(
    ("family", "others"),
    [
        pytest.param("llama", ("--num-shard", "2"), marks=pytest.mark.thorough),
        ("lfm2", ("--cpu-backend", "torch")),
        ("lfm2", ()),
        ("deepseek_v2", ("--kv-cache-dtype", "fp8_e4m3fn")),
    ],
    ids=["ranks", "torch", "states", "latents"],
)
def test_models_say_the_same_behind_what_is_read(
    family: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    own: dict[str, Any] = {"hidden_size": 128} if family == "lfm2" else {}
    make_checkpoint(tmp_path / "model", family, **own)
    args = [*flags(tmp_path / "kept"), "--model-id", str(tmp_path / "model"), *others]
    with serving(*args) as server:
        said = texts(server)
        stop(server)
    with serving(*args) as server:
        for prompt, text in zip(PROMPTS[:2], said, strict=False):
            again, cached = ask(server, prompt)
            assert again == text
            assert cached > 100


def test_a_full_disk_costs_the_prefixes_alone(tmp_path: Path) -> None:
    """The end is an orderly one; what was there before stays."""
    own = "{}"
    with serving(*flags(tmp_path), fake=own) as server:
        said = texts(server)
        stop(server)
    before = {path.name for path in tmp_path.iterdir()}
    with serving(*flags(tmp_path), fake=own) as server:
        assert texts(server) == said
        (shard,) = server.shards()
        resource.prlimit(shard, resource.RLIMIT_FSIZE, (100, 100))
        stop(server)
        assert f"prefixes are not kept in {tmp_path}: File too large: there" in server.output
    assert {path.name for path in tmp_path.iterdir()} == before
    with serving(*flags(tmp_path), fake=own) as server:
        assert ask(server, PROMPTS[0])[1] > 80


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with serving(*flags(tmp_path), fake="{}") as first:
        with serving(*flags(tmp_path), fake="{}", ready=False) as second:
            assert second.wait() == 1
            assert "in use by another server" in second.output
        assert generate(first.url, "still here")["generated_text"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fake", "others"),
    [({}, ()), (STATES, ()), (None, ("--num-shard", "2"))],
    ids=["kv", "states", "ranks"],
)
def test_what_is_saved_meanwhile_outlives_a_server_that_is_killed(
    fake: dict[str, Any] | None, others: tuple[str, ...], tmp_path: Path
) -> None:
    own = None if fake is None else json.dumps(fake)
    args = flags(tmp_path / "kept", "--prefix-cache-save-seconds", "0.1", *others)
    if own is None:
        make_checkpoint(tmp_path / "model", "llama")
        args += ["--model-id", str(tmp_path / "model")]
    with serving(*args, fake=own) as server:
        said = texts(server)
        end = time.monotonic() + PATIENCE
        while "while nobody is served" not in server.output:
            assert time.monotonic() < end, server.output
            time.sleep(0.05)
        assert texts(server) == said
        server.signal(signal.SIGKILL)
        server.wait()
    with serving(*args, fake=own) as server:
        text, cached = ask(server, PROMPTS[0])
        assert text == said[0] and cached > 80
        stop(server)  # while more may be saved
    with serving(*args, fake=own) as server:
        assert ask(server, PROMPTS[1])[1] > 80
