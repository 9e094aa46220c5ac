"""A request that kills the shard whenever it is computed, and one whose numbers break."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from tests.system.client import decode, generate, get, post
from tests.system.golden import reference, tokenize
from tests.system.server import serving
from tgi_trio.testing.checkpoints import make_checkpoint, poison_token

METHODS = ("prefill", "decode")


def test_only_the_request_that_kills_the_shard_fails() -> None:
    with serving(fake="{}") as server:
        body = {"inputs": "poison \u00fe\u00fe\u00fe"}
        poison = post(f"{server.url}/tokenize", json=body).json()[-1]["id"]
    fake = json.dumps({"crash_token": poison, "step_ms": 2, "replies": [list(range(10, 50))]})
    with serving("--shard-restart-limit", "2", fake=fake) as server:

        def generate(inputs: str) -> httpx.Response:
            body = {"inputs": inputs, "parameters": {"max_new_tokens": 40}}
            return post(f"{server.url}/generate", json=body)

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


def test_only_the_request_that_turns_nan_fails(tmp_path: Path) -> None:
    """Five that are ill want more than the whole cache: whoever is next gets blocks full of NaN."""
    folder, ill = make_checkpoint(tmp_path, "llama"), "\u00fe" + " makes ill" * 14
    poison = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("\u00fe").ids[-1]
    poison_token(folder, poison)
    texts = [f"{'a neighbour ' * (1 + n)}says" for n in range(4)]
    flags = ["--model-id", str(folder), "--dtype", "float32", "--max-total-tokens", "128"]
    flags += ["--max-batch-total-tokens", "480", "--prefix-caching", "false"]
    with serving(*flags) as server:
        ids = [tokenize(server, text) for text in texts]
        expected = reference(folder, ids, 24)

        def ask(text: str) -> list[int]:
            body = generate(server.url, text, max_new_tokens=24, details=True)
            return [token["id"] for token in body["details"]["tokens"]]

        def fail(route: str) -> httpx.Response:
            body = {"inputs": ill, "parameters": {"max_new_tokens": 24}}
            return post(f"{server.url}/{route}", json=body)

        with ThreadPoolExecutor(8) as pool:
            good = [pool.submit(ask, text) for text in texts]
            bad = [pool.submit(fail, "generate") for _ in range(4)]
            stream = pool.submit(fail, "generate_stream").result()
            assert [answer.result() for answer in good] == expected
            assert list(pool.map(ask, texts)) == expected
        last = len(tokenize(server, ill)) - 1
        assert 5 * last > 480
        message = f"the model's logits contain NaN at position {last}"
        for answer in bad:
            assert answer.result().status_code == 424
            assert message in answer.result().json()["error"]
        events = [event for line in stream.text.splitlines() if (event := decode(line))]
        assert len(events) == 1 and message in events[0]["error"]
        server.wait_idle()
        assert server.metric("tgi_shard_restarts") == 0
        assert get(f"{server.url}/health").status_code == 200
