"""A device that breaks while requests run: health says so, streams survive if it comes back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.system.client import get, post
from tests.system.server import PATIENCE, ServerProcess, serving

DECODED = 'tgi_batch_inference_count{method="decode"}'


def wait_for(condition: Callable[[], bool], server: ServerProcess) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, server.output
        time.sleep(0.02)


def ask(server: ServerProcess, text: str) -> httpx.Response:
    body = {"inputs": text, "parameters": {"max_new_tokens": 400, "details": True}}
    return post(f"{server.url}/generate", json=body)


def health(server: ServerProcess) -> tuple[int, str]:
    answer = get(f"{server.url}/health")
    return answer.status_code, answer.text


@pytest.mark.parametrize("kind", ["broken_while", "nan_while"])
def test_streams_survive_a_broken_device(tmp_path: Path, kind: str) -> None:
    """Whether it says so, or computes NaN; and however long it takes us to have it mended."""
    broken = tmp_path / "broken"
    fake = {kind: str(broken), "step_ms": 5.0, "replies": [list(range(20, 220)) * 2]}
    flags = ("--shard-restart-limit", "1000", "--stall-timeout", "600")
    with serving(*flags, fake=json.dumps(fake)) as server, ThreadPoolExecutor(4) as pool:
        undisturbed = ask(server, "question").json()
        while True:
            accepted, _ = server.books()
            with server.held():
                running = [pool.submit(ask, server, "question") for _ in range(4)]
                server.wait_metric("tgi_request_accepted", accepted + 4)
                steps = server.metric(DECODED)
            server.wait_metric(DECODED, steps + 3)
            with server.held():
                accepted, ended = server.books()
                if accepted == ended + 4:  # else all has been answered meanwhile: once more
                    broken.touch()
                    break
        wait_for(lambda: health(server)[0] == 503, server)
        broken.unlink()
        answers = [answer.result() for answer in running]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert {answer.json()["generated_text"] for answer in answers} == {
            undisturbed["generated_text"]
        }
        server.wait_ready()
        assert server.metric("tgi_shard_restarts") >= 1
        server.wait_idle()


@pytest.mark.parametrize("kind", ["broken_while", "nan_while"])
def test_the_limit_ends_a_device_that_stays_broken(tmp_path: Path, kind: str) -> None:
    broken = tmp_path / "broken"
    with serving("--shard-restart-limit", "3", fake=json.dumps({kind: str(broken)})) as server:
        assert ask(server, "question").status_code == 200
        broken.touch()
        answer = ask(server, "question")
        assert answer.status_code == 424
        assert "crashed 4 times in a row and is not started again" in answer.json()["error"]
        status, why = health(server)
        assert status == 503 and "is not started again" in why
        assert get(f"{server.url}/live").status_code == 503
        assert ask(server, "another").status_code == 503
        assert "the model cannot compute a single token any more" in server.output
