"""The embedded model through the whole server."""

from __future__ import annotations

import signal
from typing import Any

import httpx
import pytest
import trio

from tests.system.client import chat_events, generate, get, open_session, post, stream
from tests.system.server import ServerProcess, serving

pytestmark = pytest.mark.system

QUESTIONS = {
    "What is continuous batching?": "batch",
    "What is a KV block?": "block",
    "Which port does the server use?": "3000",
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_embedded_model_answers_and_stops_by_itself(demo: ServerProcess, question: str) -> None:
    chunks = list(chat_events(demo.url, question, temperature=0, max_tokens=200))
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert QUESTIONS[question] in text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


CHAT = "<|begin|><|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize("stop", [["|"], ["end"], ["<|end|>"]])
def test_the_end_token_comes_before_stop_strings(demo: ServerProcess, stop: list[str]) -> None:
    whole = generate(demo.url, CHAT, max_new_tokens=100, details=True)
    stopped = generate(demo.url, CHAT, max_new_tokens=100, details=True, stop=stop)
    assert whole["details"]["finish_reason"] == "eos_token"
    assert stopped == whole
    *_, last = chat_events(demo.url, "hi", temperature=0, max_tokens=100, stop=stop)
    assert last["choices"][0]["finish_reason"] == "stop"


def test_blocks_that_are_only_cached_are_not_in_use(demo: ServerProcess) -> None:
    generate(demo.url, CHAT * 20, max_new_tokens=40)
    demo.wait_idle()
    assert demo.metric("tgi_prefix_cache_blocks") > 0
    assert demo.metric("tgi_kv_cache_usage") == 0


def ending(answer: dict[str, Any]) -> tuple[object, ...]:
    """What must not depend on drafts: all but the last digits of log-probabilities."""
    details = answer["details"]
    tokens = [(token["id"], token["text"], token["special"]) for token in details["tokens"]]
    reason, count = details["finish_reason"], details["generated_tokens"]
    return answer["generated_text"], reason, count, tokens


@pytest.mark.parametrize("asked_for", [3, 6])
def test_drafts_change_neither_text_nor_end(demo: ServerProcess, asked_for: int) -> None:
    """Of the embedded model's own heads, which are four."""
    said = generate(demo.url, CHAT, max_new_tokens=100)["generated_text"]
    prompt = f"{CHAT}{said}<|end|>{CHAT.removeprefix('<|begin|>')}"  # it may say that again
    asked = [
        {"max_new_tokens": most, "stop": stop, "details": True}
        for stop in (["e"], ["o", "re"], [" t", "\n"], ["|"])
        for most in range(1, 26, 3)
    ]
    with serving("--speculate", str(asked_for)) as server:
        settings = get(f"{server.url}/info").json()["settings"]
        assert (settings["drafter"], settings["speculate"]) == ("medusa", min(asked_for, 4))
        bounded = f"--speculate {asked_for}: the embedded model has 4 heads" in server.output
        assert bounded is (asked_for > 4)
        assert "drafts: medusa of" in server.output
        for parameters in asked:
            drafted = generate(server.url, prompt, **parameters)
            alone = generate(demo.url, prompt, **parameters)
            assert ending(drafted) == ending(alone), parameters
        assert server.metric("tgi_batch_draft_tokens") > 0
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "tokens of a sequence a step" in server.output


@pytest.mark.trio
async def test_64_concurrent_streams_get_the_right_text_each(demo: ServerProcess) -> None:
    prompts = [
        f"Question {n}: what does the {word} do?"
        for n, word in enumerate(
            ["router", "shard", "queue", "ring", "token", "block", "client", "server"] * 8
        )
    ]
    alone = [generate(demo.url, p, max_new_tokens=24)["generated_text"] for p in prompts[:8]]
    texts: dict[int, str] = {}

    async def client(session: httpx.AsyncClient, n: int) -> None:
        await trio.sleep(n % 7 * 0.01)  # some join while others decode
        pieces = []
        async for event in stream(session, demo.url, prompts[n], max_new_tokens=24):
            if not event["token"]["special"]:
                pieces.append(event["token"]["text"])
            texts[n] = event["generated_text"] or ""
        assert "".join(pieces) == texts[n]

    async with open_session() as session:
        async with trio.open_nursery() as nursery:
            for n in range(64):
                nursery.start_soon(client, session, n)
    assert [texts[n] for n in range(8)] == alone
    assert len(texts) == 64 and all(texts.values())
    demo.wait_idle()


@pytest.mark.trio
async def test_a_client_that_leaves_frees_its_blocks(demo: ServerProcess) -> None:
    cancelled = 'tgi_request_cancelled{phase="decode"}'
    before = demo.metric(cancelled)
    long = {"max_new_tokens": 900, "min_new_tokens": 900}
    async with open_session() as session:
        while demo.metric(cancelled) < before + 5:  # one may end before its client has left
            events = stream(session, demo.url, "Tell me a long story", **long)
            async for _ in events:
                break
            await events.aclose()
            demo.wait_idle()


def test_metrics_say_what_happened(demo: ServerProcess) -> None:
    generate(demo.url, "Hello", max_new_tokens=8)
    demo.wait_idle()
    accepted, ended = demo.books()
    assert accepted == ended > 0
    assert demo.metric("tgi_batch_step_gap_duration_count") > 0
    assert demo.metric("tgi_shard_ready") == 1


def test_info_models_tokenize(demo: ServerProcess) -> None:
    info = get(f"{demo.url}/info").json()
    assert info["model_id"] == "tgi-trio/demo"
    assert info["max_total_tokens"] > info["max_input_tokens"] > 0
    models = get(f"{demo.url}/v1/models").json()
    assert models["data"][0]["id"] == "tgi-trio/demo"
    text = "Greetings from the ring"
    tokens = post(f"{demo.url}/tokenize", json={"inputs": text}).json()
    joined = "".join(t["text"] for t in tokens)
    assert joined == text


def test_a_prompt_seen_before_is_not_computed_again(demo: ServerProcess) -> None:
    prompt = "The prefix cache keeps the blocks of a prompt that has been computed. " * 4
    first = generate(demo.url, prompt, max_new_tokens=20)
    hits = demo.metric("tgi_prefix_cache_hit_tokens")
    second = generate(demo.url, prompt, max_new_tokens=20)
    assert second == first
    assert demo.metric("tgi_prefix_cache_hit_tokens") > hits
    demo.wait_idle()


def test_a_prompt_is_reused_by_requests_of_the_same_salt_alone(demo: ServerProcess) -> None:
    body = {"prompt": "A tenant's own words, said over and over. " * 8, "max_tokens": 1}

    def cached(**more: str) -> int:
        reply = post(f"{demo.url}/v1/completions", json=body | more)
        reply.raise_for_status()
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="one") == 0
    reused = cached(cache_salt="one")
    assert reused > 0
    assert cached(cache_salt="two") == 0
    assert cached() == 0
    assert cached() == reused
