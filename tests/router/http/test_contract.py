"""Lines of TGI's contract that cross its routes: the order of checks, defaults, headers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.http.messages import replies

pytestmark = pytest.mark.trio

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "Yo"}]


def native(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "x", "parameters": parameters}


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(lambda prompt: "Hi", **options)


# ---- the order of checks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        # Before a permit is taken: what needs no prompt and no scheduler.
        ("/generate", {"inputs": 1}, 422, "inputs: "),
        ("/generate", native(best_of=9, top_p=2), 422, "`best_of` must be > 0 and <= 2."),
        ("/generate_stream", native(best_of=2), 200, "`best_of` != 1 is not supported"),
        (TEXT, {"prompt": ["x"] * 5, "suffix": ""}, 422, "Suffix is not supported"),
        (TEXT, {"prompt": ["x"] * 5}, 422, "maximum allowed batch size of 4"),
        (CHAT, {"messages": []}, 422, "Template error: "),
        (CHAT, {"messages": USER, "tool_choice": "x"}, 422, "Tool with name x not found"),
        # After it: parameters, then the prompt.
        ("/generate", native(top_p=2), 429, "Model is overloaded"),
        ("/generate_stream", native(top_p=2), 200, "Model is overloaded"),
        ("/", {**native(top_p=2), "stream": True}, 200, "Model is overloaded"),
        (CHAT, {"messages": USER, "stop": ["x"] * 5}, 429, "Model is overloaded"),
        (TEXT, {"prompt": ""}, 429, "Model is overloaded"),
        ("/vertex", {"instances": [{"inputs": ""}]}, 429, "Model is overloaded"),
        # Without a permit altogether.
        ("/tokenize", {"inputs": "x"}, 200, '"id"'),
        ("/chat_tokenize", {"messages": USER}, 200, "templated_text"),
    ],
)
async def test_a_permit_is_taken_where_tgi_takes_it(path, body, status, text):
    async with served(engine(limits=ServedLimits(max_concurrent_requests=1))) as server:
        server.engine.permits = 1  # the only one is taken
        client = await server.connect()
        answer = await client.post(path, body)
    assert answer.status == status
    assert text in answer.body.decode()


# ---- defaults ----------------------------------------------------------------------------------


async def test_prompt_details_bring_details_with_them():
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post("/generate", native(decoder_input_details=True))
    assert [token["text"] for token in answer.json()["details"]["prefill"]] == ["<s>", "x"]


@pytest.mark.parametrize("best_of", [0, 1, None])
async def test_a_best_of_one_is_a_plain_generation(best_of):
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post("/generate", native(best_of=best_of, details=True, seed=7))
    details = answer.json()["details"]
    assert list(details) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert (details["seed"], details["prefill"]) == (None, [])  # greedy


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
async def test_a_seed_comes_back_where_tokens_are_drawn(seed):
    async with served(engine()) as server:
        client = await server.connect()
        parameters = {"seed": seed, "temperature": 1, "top_k": 3, "details": True}
        answer = await client.post("/generate", native(**parameters))
    assert answer.json()["details"]["seed"] == seed


async def test_tokenize_ignores_every_parameter():
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post("/tokenize", native(truncate=0, temperature=-1))
        empty = await client.post("/tokenize", {"inputs": ""})
    assert [token["id"] for token in answer.json()] == [0, 89]
    assert empty.json() == [{"id": 0, "text": "", "start": 0, "stop": 0}]


@pytest.mark.parametrize(
    ("asked", "logprobs"),
    [
        ({"top_logprobs": 0}, None),
        ({"logprobs": True}, [{"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": []}]),
        ({"logprobs": True, "top_logprobs": 0},
         [{"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": []}]),
    ],
)  # fmt: skip
async def test_alternatives_are_shown_with_log_probabilities_only(asked, logprobs):
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post(CHAT, {"messages": USER, "max_tokens": 1, **asked})
    shown = answer.json()["choices"][0]["logprobs"]
    assert shown == (logprobs and {"content": logprobs})


@pytest.mark.parametrize("logprobs", [None, False])
async def test_alternatives_of_nothing_are_refused(logprobs):
    async with served(engine()) as server:
        client = await server.connect()
        body = {"messages": USER, "top_logprobs": 2, "logprobs": logprobs}
        answer = await client.post(CHAT, body)
    assert answer.status == 422  # 400 at OpenAI, with the same words in its message
    assert "`top_logprobs` needs `logprobs` to be true" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"user": "u", "store": True, "metadata": {"a": "b"}, "reasoning_effort": None},
        {"tool_choice": None, "tools": None, "response_format": None, "stop": None, "n": None},
        {"tools": []},
        {"temperature": 5, "max_tokens": None, "seed": None, "logit_bias": {}},
    ],
)
async def test_what_a_chat_may_carry_without_effect(more):
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post(CHAT, {"messages": USER, **more})
    assert answer.status == 200, answer.text
    assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "Hi"}
    assert server.engine.submitted[0].sampling.grammar == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER}),
        (CHAT, {"messages": USER, "truncate_prompt_tokens": -1}),
        (TEXT, {"prompt": "x"}),
        (TEXT, {"prompt": "x" * 999, "truncate_prompt_tokens": -1}),
    ],
)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_no_limit_is_as_many_tokens_as_there_is_room_for(path, body, name):
    """As at LM Studio and llama.cpp, whose clients send -1."""
    async with served(engine()) as server:
        client = await server.connect()
        for more in ({}, {name: -1} if path == CHAT else {"max_tokens": -1}):
            assert (await client.post(path, {**body, **more})).status == 200
    without, unlimited = (each.stopping.max_new_tokens for each in server.engine.submitted)
    assert unlimited == without > 1


# ---- headers -----------------------------------------------------------------------------------

COMPUTE = {"x-compute-type", "x-compute-characters"}
TIMES = {
    "x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token",
    "x-prompt-tokens", "x-generated-tokens",
}  # fmt: skip
STREAM = {"x-accel-buffering", "cache-control"}
OURS = {"x-prefill-time", "x-decode-time", "x-cached-tokens"}


@pytest.mark.parametrize(
    ("path", "body", "expected", "characters"),
    [
        ("/generate", native(), COMPUTE | TIMES | {"x-compute-time"}, "1"),
        ("/", native(), COMPUTE | TIMES | {"x-compute-time"}, "1"),
        (CHAT, {"messages": USER}, COMPUTE | TIMES | {"x-compute-time"}, "20"),
        (TEXT, {"prompt": ["né", "x"]}, COMPUTE | TIMES, "3"),
        ("/generate_stream", native(), COMPUTE | STREAM, "1"),
        ("/", {**native(), "stream": True}, COMPUTE | STREAM, "1"),
        (CHAT, {"messages": USER, "stream": True}, COMPUTE | STREAM, "20"),
        (TEXT, {"prompt": ["né", "x"], "stream": True}, COMPUTE | STREAM, "3"),
        ("/tokenize", native(), set(), None),
        ("/chat_tokenize", {"messages": USER}, set(), None),
        ("/vertex", {"instances": [{"inputs": "x"}]}, set(), None),
        ("/info", None, set(), None),
    ],
)
async def test_the_headers_of_each_route(path, body, expected, characters):
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.ask("GET" if body is None else "POST", path, body)
    assert answer.status == 200
    assert set(answer.headers) & (COMPUTE | TIMES | STREAM | {"x-compute-time"}) == expected
    assert bool(OURS & set(answer.headers)) == (expected >= TIMES)
    assert answer.headers.get("x-compute-characters") == characters


async def test_completions_add_up_their_prompts():
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post(TEXT, {"prompt": ["né", "x"], "max_tokens": 2})
    assert answer.headers["x-prompt-tokens"] == "6"  # a token per byte, and one in front of each
    assert answer.headers["x-generated-tokens"] == "4"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, {"POST"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("DELETE", "/v1/models", {"GET", "HEAD"}),
    ],
)
async def test_another_method_is_told_the_right_one(method, path, allow):
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.ask(method, path)
    assert answer.status == 405
    assert set(answer.headers["allow"].split(",")) == allow
    error = msgspec.json.decode(answer.body, type=replies.OpenAIErrorResponse)
    assert f"`{path}` does not answer {method}; it answers " in error.error.message


async def test_requests_are_counted_where_tgi_counts_them():
    async with served(engine()) as server:
        client = await server.connect()
        for path, body in (
            ("/tokenize", native()),  # not counted
            ("/chat_tokenize", {"messages": USER}),
            (CHAT, {"messages": USER}),
            (TEXT, {"prompt": ["x", "y"]}),
        ):
            assert (await client.post(path, body)).status == 200
        text = (await client.get("/metrics")).body.decode()
    assert "tgi_request_count 3\n" in text
