"""A request that kills the shard whenever it is computed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.system.server import serving

METHODS = ("prefill", "decode")


def test_only_the_request_that_kills_the_shard_fails() -> None:
    with serving(fake="{}") as server:
        body = {"inputs": "poison \u00fe\u00fe\u00fe"}
        poison = httpx.post(f"{server.url}/tokenize", json=body, timeout=30).json()[-1]["id"]
    fake = json.dumps({"crash_token": poison, "step_ms": 2, "replies": [list(range(10, 50))]})
    with serving("--shard-restart-limit", "2", fake=fake) as server:

        def generate(inputs: str) -> httpx.Response:
            body = {"inputs": inputs, "parameters": {"max_new_tokens": 40}}
            return httpx.post(f"{server.url}/generate", json=body, timeout=120)

        with ThreadPoolExecutor(9) as pool:
            good = [pool.submit(generate, f"question {n}") for n in range(8)]
            bad = pool.submit(generate, body["inputs"]).result()
            answers = [answer.result() for answer in good]
        assert bad.status_code == 424
        assert "ended again and again" in bad.json()["error"]
        assert [answer.status_code for answer in answers] == [200] * 8
        assert len({answer.json()["generated_text"] for answer in answers}) == 1
        server.wait_ready()
        deaths = [server.metric(f'tgi_batch_inference_failure{{method="{m}"}}') for m in METHODS]
        assert sum(deaths) == server.metric("tgi_shard_restarts") >= 3
        assert generate("after it").status_code == 200
        server.wait_idle()
