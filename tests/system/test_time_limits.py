"""Requests that have only so much time, against a shard whose steps take 20 ms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.system.client import decode, post
from tests.system.server import ServerProcess, serving

pytestmark = pytest.mark.system

ENDLESS = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}  # 18 s of steps
PASSED = "Request failed during generation: the request's deadline has passed"


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerProcess]:
    with serving("--max-total-tokens", "1024", fake='{"step_ms": 20}') as server:
        yield server


def test_time_over_is_a_424_and_frees_everything(slow: ServerProcess) -> None:
    url = f"{slow.url}/v1/completions"
    body = post(url, json={**ENDLESS, "timeout": 0.3})
    header = post(url, json=ENDLESS, headers={"x-request-timeout": "0.3"})
    for answer in (body, header):
        assert (answer.status_code, answer.json()["error"]["message"]) == (424, PASSED)
    slow.wait_idle()


def test_a_stream_shows_what_there_was_time_for(slow: ServerProcess) -> None:
    headers = {"content-type": "application/json"}
    tokens: list[dict[str, Any]] = []
    for seconds in (1, 4, 16):  # on a busy machine there may have been none for a token
        parameters = {"max_new_tokens": 900, "timeout": seconds, "seed": 1}
        body = orjson.dumps({"inputs": "x", "parameters": parameters})
        answer = post(f"{slow.url}/generate_stream", content=body, headers=headers)
        *tokens, last = [event for line in answer.text.splitlines() if (event := decode(line))]
        assert last == {"error": PASSED, "error_type": "generation"}
        if tokens:
            break
    assert tokens and all("token" in event for event in tokens)
    slow.wait_idle()


def test_who_is_in_time_is_not_bothered(slow: ServerProcess) -> None:
    answer = post(
        f"{slow.url}/v1/completions",
        json={**ENDLESS, "max_tokens": 3, "timeout": 60, "priority": 1},
    )
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3
