"""Gaps: `suffix` in completions, and Mistral's endpoint for them."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.router.http.fake_engine import GAP_MARKS as MARKS
from tests.router.http.fake_engine import FakeEngine, byte_tokenizer
from tests.router.http.openai_answers import usage
from tests.router.http.served import served
from tgi_trio.router.http.messages import replies

pytestmark = pytest.mark.trio


def engine() -> FakeEngine:
    return FakeEngine(lambda prompt: "x + y", tokenizer=byte_tokenizer(MARKS))


def ids(server) -> list[list[str]]:
    """Return the tokens of the prompts that the engine has got."""
    return [server.engine.tokenizer.written(each.prompt_ids) for each in server.engine.submitted]


BEFORE, BEHIND = ["r", "e", "t", "Ġ"], ["Ċ", "}"]
WRITTEN = ["<s>", MARKS[0], *BEFORE, MARKS[1], *BEHIND, MARKS[2]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_suffix_is_written_behind_the_prompt_of_a_model_that_fills_gaps(http, stream):
    body = {"prompt": "ret ", "suffix": "\n}", "stream": stream, "stop_token_ids": [3]}
    async with served(engine(), http) as server:
        client = await server.connect()
        answer = await client.post("/v1/completions", body)
    assert answer.status == 200
    assert ids(server) == [WRITTEN]
    (request,) = server.engine.submitted
    added = server.engine.tokenizer.added_tokens
    assert request.stopping.stop_ids == {3, *(added[mark] for mark in MARKS)}
    if not stream:
        assert answer.json()["choices"][0]["text"] == "x + y"
        assert answer.json()["usage"]["prompt_tokens"] == len(WRITTEN)


async def test_each_prompt_of_several_has_the_suffix_and_an_empty_one_is_one(http):
    async with served(engine(), http) as server:
        client = await server.connect()
        answer = await client.post(
            "/v1/completions", {"prompt": ["ret ", ""], "suffix": "", "n": 2, "ignore_eos": True}
        )
    assert answer.status == 200
    first = ["<s>", MARKS[0], *BEFORE, MARKS[1], MARKS[2]]
    second = ["<s>", *MARKS[:3]]
    assert ids(server) == [first, first, second, second]
    # As the model's own end is.
    assert not any(each.stopping.stop_ids for each in server.engine.submitted)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"echo": True}, "`echo` and `suffix` exclude each other"),
        ({"truncate_prompt_tokens": 4}, "`truncate_prompt_tokens` and `suffix` exclude each other"),
        ({"prompt": [5, 6]}, "`suffix` needs a `prompt` of text"),
        ({"prompt": ["a", "b"], "echo": True}, "`echo` and `suffix`"),
        ({"suffix": 1}, "suffix: Expected `str | null`, got `int`"),
    ],
)
async def test_what_contradicts_a_suffix_is_refused(more, text):
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post("/v1/completions", {"prompt": "a", "suffix": "b", **more})
    assert answer.status == 422 and text in answer.text
    assert server.engine.submitted == []


FIM = "/v1/fim/completions"


async def test_mistrals_endpoint_answers_as_a_chat(http):
    body = {"prompt": "ret ", "suffix": "\n}", "random_seed": 7, "max_tokens": 9, "temperature": 1}
    async with served(engine(), http) as server:
        client = await server.connect()
        whole = await client.post(FIM, body)
        stream = await client.post(FIM, {**body, "stream": True})
        bare = await client.post(FIM, {"prompt": "", "model": "tgi"})
    answer = msgspec.json.decode(whole.body, type=replies.ChatCompletion)
    assert answer.choices[0].message == replies.OutputMessage("assistant", "x + y")
    assert whole.json()["usage"] == usage(len(WRITTEN), 6)
    *chunks, last, done = stream.text.removesuffix("\n\n").split("\n\n")
    texts = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    assert "".join(each["choices"][0]["delta"]["content"] for each in texts) == "x + y"
    assert json.loads(last.removeprefix("data: "))["usage"] == whole.json()["usage"]
    assert done == "data: [DONE]" and bare.status == 200
    assert ids(server) == [WRITTEN, WRITTEN, ["<s>", *MARKS[:3]]]
    first = server.engine.submitted[0]
    assert (first.sampling.seed, first.stopping.max_new_tokens) == (7, 9)


@pytest.mark.parametrize(
    ("body", "status", "param", "text"),
    [
        ({"prompt": "a", "random_seed": "b"}, 422, "random_seed", "Expected `int | null`"),
        ({"prompt": "a", "max_tokens": 0}, 422, "max_tokens", "strictly positive"),
        ({"suffix": "a"}, 422, "prompt", "missing required field `prompt`"),
        ({"prompt": ["a"]}, 422, "prompt", "prompt: Expected `str`"),
        ({"prompt": "a", "model": "other"}, 404, "model", "other"),
    ],
)
async def test_mistrals_endpoint_names_what_is_wrong(body, status, param, text):
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post(FIM, body)
    assert answer.status == status
    assert answer.json()["error"]["param"] == param and text in answer.text


async def test_a_model_that_fills_no_gaps_says_so_in_tgis_words():
    async with served(FakeEngine()) as server:
        client = await server.connect()
        answer = await client.post(FIM, {"prompt": "a"})
    assert answer.status == 422
    assert answer.json()["error_type"] == "suffix not supported"
