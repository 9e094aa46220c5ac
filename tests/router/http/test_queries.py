"""`inputs` as a list of queries: one answer each, in order, or one stream for all."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import pytest
import trio

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.http.messages import replies

pytestmark = pytest.mark.trio


def echo() -> FakeEngine:
    """Return an engine that answers what it was asked, backwards."""
    return FakeEngine(lambda prompt: prompt.removeprefix("<s>")[::-1])


def details(answer: replies.GenerateResponse | replies.StreamResponse) -> Any:
    """Return the details of an answer, which must be there."""
    assert isinstance(answer.details, replies.Details | replies.StreamDetails)
    return answer.details


@pytest.mark.parametrize("path", ["/", "/generate", "/invocations"])
async def test_answers_come_in_the_order_of_the_queries(http, path):
    async with served(echo(), http) as server:
        client = await server.connect()
        parameters = {"return_full_text": True, "details": True}
        answer = await client.post(path, {"inputs": ["ab", "cdefg"], "parameters": parameters})
        one = await client.post(path, {"inputs": ["ab"]})
    found = msgspec.json.decode(answer.body, type=list[replies.GenerateResponse])
    assert [each.generated_text for each in found] == ["abba", "cdefggfedc"]
    assert [details(each).generated_tokens for each in found] == [3, 6]
    assert answer.headers["x-compute-characters"] == "7"
    assert answer.headers["x-prompt-tokens"] == "9"
    assert answer.headers["x-generated-tokens"] == "9"
    assert len(one.json()) == 1


@pytest.mark.parametrize(("path", "more"), [("/generate_stream", {}), ("/", {"stream": True})])
async def test_each_event_says_whose_token_it_is(http, path, more):
    async with served(echo(), http) as server:
        client = await server.connect()
        parameters = {"details": True, "top_n_tokens": 2, "return_full_text": True}
        queries = ["ab", "cdefg", "h"]
        answer = await client.post(path, {"inputs": queries, "parameters": parameters, **more})
    events = [msgspec.json.decode(each, type=replies.StreamResponse) for each in answer.events()]
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    by_query = defaultdict(list)
    for event in events:
        by_query[event.query_id].append(event)
    for i, query in enumerate(queries):
        mine = by_query.pop(i)
        assert [event.position for event in mine] == list(range(len(mine)))
        text = "".join(event.token.text for event in mine if not event.token.special)
        assert text == query[::-1]
        assert [event.generated_text for event in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].generated_text == query + query[::-1]
        assert details(mine[-1]).input_length == len(query) + 1
        assert all(len(event.top_tokens or []) == 2 for event in mine)
    assert not by_query


async def test_a_single_query_has_no_label(http):
    async with served(echo(), http) as server:
        client = await server.connect()
        answer = await client.post("/generate_stream", {"inputs": "a"})
    assert b"query_id" not in answer.body and b"position" not in answer.body


@pytest.mark.parametrize(
    ("inputs", "parameters", "text"),
    [
        (["a", ""], {}, "`inputs` cannot be empty"),
        (["a", "x" * 2000], {"max_new_tokens": 1}, "`inputs` must have less than"),
        (["a", "b"], {"truncate": 5000}, "`truncate` must be strictly positive"),
        (["a", "b"], {"best_of": 3}, "`best_of` must be > 0"),
    ],
)
async def test_what_is_wrong_with_one_query_refuses_all(http, inputs, parameters, text):
    async with served(echo(), http) as server:
        client = await server.connect()
        body = {"inputs": inputs, "parameters": parameters}
        answer = await client.post("/generate", body)
        stream = await client.post("/generate_stream", body)
    assert answer.status == 422
    assert text in answer.json()["error"]
    assert len(stream.events()) == 1 and b'"error_type":"validation"' in stream.body
    assert server.engine.submitted == [] and server.engine.permits == 0


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
async def test_too_many_queries_are_refused_like_too_many_prompts(http, path):
    async with served(echo(), http) as server:
        client = await server.connect()
        many = await client.post(path, {"inputs": ["a"] * 5})
        none = await client.post(path, {"inputs": []})
    assert many.status == none.status == 422
    assert many.json() == {
        "error": "Number of prompts exceeds the maximum allowed batch size of 4",
        "error_type": "batch size exceeded",
    }
    assert b"inputs: Expected `array` of length >= 1" in none.body


async def test_best_of_is_taken_for_each_query():
    async with served(echo()) as server:
        client = await server.connect()
        parameters = {"best_of": 2, "do_sample": True, "details": True}
        answer = await client.post("/generate", {"inputs": ["ab", "cd"], "parameters": parameters})
    found = msgspec.json.decode(answer.body, type=list[replies.GenerateResponse])
    assert [each.generated_text for each in found] == ["ba", "dc"]
    others = [details(each).best_of_sequences for each in found]
    assert [[loser.generated_text for loser in losers] for losers in others] == [["ba"], ["dc"]]
    assert len(server.engine.submitted) == 4


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_every_query_takes_a_permit(path):
    fake = FakeEngine(limits=ServedLimits(max_concurrent_requests=2))
    async with served(fake) as server:
        client = await server.connect()
        with fake.permit():
            refused = await client.post(path, {"inputs": ["a", "b"]})
        assert b'"error_type":"overloaded"' in refused.body
        assert fake.permits == 0 and fake.submitted == []
        taken = await client.post(path, {"inputs": ["a", "b"]})
        assert b"overloaded" not in taken.body
    assert fake.permits == 0


async def test_leaving_aborts_every_query(http):
    fake = echo()
    async with served(fake, http, running=False) as server:
        client = await server.connect()
        await client.send("POST", "/generate_stream", {"inputs": ["abc", "def", "ghi"]})
        while len(fake.live) < 3:
            await trio.sleep(0.001)
        fake.step()
        await client.stream.aclose()
        while fake.live or fake.permits:
            await trio.sleep(0.001)
        assert len(fake.left) == 3


async def test_a_query_that_fails_says_which(http):
    fake = FakeEngine(lambda prompt: "Hi there")
    fake.fail_after = 2
    async with served(fake, http) as server:
        client = await server.connect()
        answer = await client.post("/generate_stream", {"inputs": ["a", "b"]})
        whole = await client.post("/generate", {"inputs": ["a", "b"]})
    errors = [msgspec.json.decode(each) for each in answer.events() if b'"error"' in each]
    assert sorted(each["query_id"] for each in errors) == [0, 1]
    assert {each["error_type"] for each in errors} == {"generation"}
    assert whole.status == 424 and fake.permits == 0
